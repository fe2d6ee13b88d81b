"""Checkpoints: what a reader of a model on disk offers, and which reader a path gets.

Tensors come one at a time, float32, under this program's own names (`layers.3.attention.q.weight`, see `weights.py`),
with q and k rows in the half-split rotary order. A reader refuses by name what the graph cannot run.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.models.description import ModelDescription, TokenizerDescription
from workers.models.errors import UnreadableCheckpoint
from workers.models.gguf_file import GgufCheckpoint
from workers.models.huggingface import HuggingFaceCheckpoint


class Checkpoint(Protocol):
    """A model on disk. tokenizer_files: what goes into the artifact beside the graph, by file name."""

    @property
    def description(self) -> ModelDescription: ...

    @property
    def tokenizer(self) -> TokenizerDescription: ...

    @property
    def tokenizer_files(self) -> Mapping[str, bytes]: ...

    @property
    def source_files(self) -> list[Path]:
        """Every file that was or will be read, for the source's digest."""

    def tensor(self, name: str) -> NDArray[np.float32]:
        """Read one tensor. Raises UnreadableCheckpoint."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file or a Hugging Face folder.

    Raises UnreadableCheckpoint where there is none, UnsupportedModel where the graph could not run it.
    """
    if path.is_dir():
        if (path / "config.json").exists():
            return HuggingFaceCheckpoint(path)
        models = sorted(path.glob("*.gguf"))
        if len(models) == 1:
            return GgufCheckpoint(models[0])
        if models:
            names = ", ".join(model.name for model in models)
            raise UnreadableCheckpoint(f"{path} holds several GGUF files ({names}); name one of them")
        raise UnreadableCheckpoint(
            f"{path} has no config.json and no .gguf file; give a Hugging Face model folder or a GGUF file"
        )
    if not path.exists():
        raise UnreadableCheckpoint(f"{path} does not exist; give a Hugging Face model folder, a GGUF file, or demo")
    return GgufCheckpoint(path)
