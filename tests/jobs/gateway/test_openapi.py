"""The OpenAPI document is what the gateway does: schemathesis asks it everything and knows each answer from it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.settings import Settings
from jobs.worker_process import WorkerProcess
from tests.jobs.gateway.conftest import MakeGateway, RunningGateway, StartWorker

ROOT = Path(__file__).parents[3]
# What a schema cannot say: that two fields exclude each other, that a prompt needs a text.
UNSAID = "positive_data_acceptance"


def ask_everything(
    gateway: RunningGateway, *, examples: int, phases: str, unsaid: bool = False, routes: str = ""
) -> None:
    """Run schemathesis against a gateway. The seed is fixed: a finding today is one tomorrow."""
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{gateway.url}/openapi.json",
        "--header",
        f"Authorization: Bearer {gateway.key('schemathesis')}",
        f"--max-examples={examples}",
        f"--phases={phases}",
        "--seed=1",
        "--generation-deterministic",
        "--suppress-health-check=all",
        "--warnings=off",
        "--no-color",
    ]
    command += [f"--exclude-checks={UNSAID}"] if unsaid else []
    command += [f"--include-path-regex={routes}"] if routes else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=gateway.settings.home, timeout=1500)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_answer_is_a_documented_one(shared_gateway: RunningGateway, shared_worker: WorkerProcess) -> None:
    ask_everything(shared_gateway, examples=3, phases="fuzzing", unsaid=True)


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_every_answer_is_a_documented_one_asked_long_and_on_both_databases(
    served_settings: Settings, make_gateway: MakeGateway, start_worker: StartWorker
) -> None:
    gateway = make_gateway(served_settings)
    start_worker(served_settings)
    ask_everything(gateway, examples=60, phases="coverage,fuzzing,stateful", unsaid=True)
    ask_everything(gateway, examples=60, phases="coverage,fuzzing", routes="^/v1/(files|batches|requests)")


def test_each_error_code_is_in_the_docs() -> None:
    """A code is what a program can act on; one that is not written down cannot be relied on."""
    sources = [*sorted((ROOT / "jobs" / "gateway").glob("*.py")), ROOT / "jobs" / "validation.py"]
    code = "".join(path.read_text() for path in sources)
    raised = set(re.findall(r'\bcode="([a-z_]+)"', code)) | set(re.findall(r'FoundError\(\s*"([a-z_]+)"', code))
    assert len(raised) > 20
    documented = "".join((ROOT / "docs" / name).read_text() for name in ("api.md", "input.md"))
    missing = sorted(name for name in raised if f"`{name}`" not in documented)
    assert not missing


def test_each_route_is_in_the_docs(shared_gateway: RunningGateway) -> None:
    documented = (ROOT / "docs" / "api.md").read_text()
    document: dict[str, Any] = httpx.get(f"{shared_gateway.url}/openapi.json", trust_env=False).json()
    for path, operations in document["paths"].items():
        for method in operations:
            assert f"`{method.upper()} {path}`" in documented, f"{method.upper()} {path}"


def test_errors_are_declared_in_the_form_in_which_they_come(shared_gateway: RunningGateway) -> None:
    document: dict[str, Any] = httpx.get(f"{shared_gateway.url}/openapi.json", trust_env=False).json()
    assert "422" not in str(document)
    for path, operations in document["paths"].items():
        for operation in operations.values():
            refusal = operation["responses"]["400"]["content"]["application/json"]["schema"]
            assert refusal == {"$ref": "#/components/schemas/Error"}, path
            if path.startswith("/v1/"):
                assert {"401", "404", "413", "429", "500", "503"} <= set(operation["responses"]), path
                assert operation["security"], path
