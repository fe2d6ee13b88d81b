"""Checkpoints and reference outputs that lie beside the repository and are not part of it."""

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


def stories_folder() -> Path:
    """The stories260K checkpoint with its reference outputs; skips the test where it is absent."""
    return _folder("stories260K")


def llama2_tokenizer_folder() -> Path:
    """The Llama 2 tokenizer; skips the test where it is absent."""
    return _folder("llama2-tokenizer")


def _folder(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there: these data are not part of the repository")
    return folder
