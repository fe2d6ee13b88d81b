"""Finding a converted model by path or name. Only its manifest is read; the rest of it is the workers' business."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from storage.errors import PromptmillError

MANIFEST = "manifest.json"
DEMO_NAME = "smollm2-135m-instruct"


class ModelNotFound(PromptmillError):
    """No artifact is where one was looked for."""


@dataclass(frozen=True, slots=True)
class FoundArtifact:
    """model: the name that lines use. digest: names exactly this content."""

    path: Path
    model: str
    digest: str


def find_artifact(named: str | None, artifacts_dir: Path) -> FoundArtifact:
    """The artifact a user means: a folder, a name in the home's `artifacts`, or, if none is named, the only one there.

    Raises ModelNotFound with what there is and how to get one.
    """
    known = known_artifacts(artifacts_dir)
    if named is None:
        if len(known) == 1:
            return _read(known[0])
        there = f"there are {', '.join(path.name for path in known)}" if known else f"{artifacts_dir} has none"
        way_out = "name one with --model" if known else f"make one: promptmill convert demo {artifacts_dir / DEMO_NAME}"
        raise ModelNotFound(f"no model is named and {there}; {way_out}", code="model_not_found")
    for path in (Path(named), artifacts_dir / named):
        if (path / MANIFEST).is_file():
            return _read(path)
    there = ", ".join(path.name for path in known) or "none"
    source = "demo" if named == DEMO_NAME else "SOURCE"
    raise ModelNotFound(
        f"{named} is not an artifact (a folder with {MANIFEST}), nor a name in {artifacts_dir} ({there}); "
        f"convert the model first: promptmill convert {source} {artifacts_dir / Path(named).name}",
        code="model_not_found",
    )


def known_artifacts(artifacts_dir: Path) -> list[Path]:
    """The artifacts in a home, by name."""
    if not artifacts_dir.is_dir():
        return []
    return sorted(path for path in artifacts_dir.iterdir() if (path / MANIFEST).is_file())


def _read(path: Path) -> FoundArtifact:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return FoundArtifact(path.absolute(), str(manifest["model"]), str(manifest["digest"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFound(
            f"{path / MANIFEST} cannot be read ({error}); convert the model again", code="artifact_damaged"
        ) from error
