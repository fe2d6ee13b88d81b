"""Imports run one way: workers → jobs → storage. Run by `make check`; prints each import that does not keep to it.

`workers` may use of `jobs` only what both sides have agreed on, and each outside thing has one door.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Of `jobs`, what the workers may use.
CONTRACT = {"jobs.settings", "jobs.protocol", "jobs.queue", "jobs.logs", "jobs.dispatch"}
FORBIDDEN = {
    "storage": {"jobs", "workers"},
    "jobs": {"workers"},
    "workers": set(),
}
# Outside package → the places (files or folders) that may import it.
DOORS = {
    "sqlalchemy": ("storage/",),
    "alembic": ("storage/",),
    "celery": (
        "jobs/queue.py",
        "jobs/queue_guard.py",
        "jobs/reception.py",
        "jobs/interactive.py",
        "jobs/dispatch.py",
        "jobs/sweep.py",
        "jobs/run.py",
        "jobs/gateway/state.py",
        "workers/",
    ),
    "kombu": ("jobs/queue.py", "jobs/queue_guard.py"),
    "onnxruntime": ("workers/engine/", "workers/models/", "workers/probe.py"),
    "pynvml": ("workers/",),
    "fastapi": ("jobs/gateway/",),
    "pydantic_settings": ("jobs/settings.py",),
}


def main() -> int:
    paths = [path for package in FORBIDDEN for path in sorted((ROOT / package).rglob("*.py"))]
    faults = [fault for path in paths for fault in faults_in(path)]
    for fault in faults:
        print(fault)
    print(f"layering: {len(faults)} faults" if faults else "layering: clean")
    return 1 if faults else 0


def faults_in(path: Path) -> Iterator[str]:
    place = path.relative_to(ROOT).as_posix()
    package = place.partition("/")[0]
    for line, module in imports_of(path):
        top = module.partition(".")[0]
        if top in FORBIDDEN[package]:
            yield f"{place}:{line}: {package} must not import {module}"
        if package == "workers" and top == "jobs" and module not in CONTRACT:
            yield f"{place}:{line}: of jobs, workers may import only {', '.join(sorted(CONTRACT))}; not {module}"
        if top in DOORS and not place.startswith(DOORS[top]):
            yield f"{place}:{line}: {top} is imported only in {', '.join(DOORS[top])}"


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "jobs":
                yield from ((node.lineno, f"jobs.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, node.module


if __name__ == "__main__":
    sys.exit(main())
