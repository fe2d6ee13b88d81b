"""Checkpoint → artifact."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from workers.models import smoothing
from workers.models.artifact import (
    AMX_MODEL_FILE,
    MODEL_FILE,
    Artifact,
    Source,
    file_sha256,
    load_artifact,
    new_artifact_folder,
    write_manifest,
)
from workers.models.checkpoint import Checkpoint, open_checkpoint
from workers.models.demo import REQUIREMENT, demo_checkpoint
from workers.models.description import DType
from workers.models.errors import ArtifactError, ConversionError
from workers.models.graph import read_epsilon, write_graph
from workers.models.weights import DATA_FILE, write_weights
from workers.tokenizer import open_encoder

DEMO = "demo"
# RMSNorm's epsilon is float32 in the graph.
EPSILON_TOLERANCE = 1e-6

# What is being done, and how far: (stage, done, total).
Progress = Callable[[str, int, int], None]


def convert(
    source: str,
    out_dir: Path,
    *,
    dtype: DType,
    context_length: int | None = None,
    model: str | None = None,
    force: bool = False,
    cache: Path,
    progress: Progress = lambda stage, done, total: None,
) -> Artifact:
    """Write the artifact of a checkpoint and return it.

    source: a Hugging Face folder, a GGUF file, or "demo". context_length: at most the checkpoint's, which is the
    default. model: the artifact's model name, else the folder's. cache: where the demo's download is kept.
    Raises UnreadableCheckpoint, UnsupportedModel, ConversionError.
    """
    # Refuse what is certain to fail before a long download or read.
    _check_name(model or out_dir.name)
    if source == DEMO and not Path(DEMO).exists():
        progress(f"downloading {REQUIREMENT} (93 MB)", 0, 1)
        with demo_checkpoint(cache) as path:
            return _convert(path, out_dir, dtype, context_length, model, force, progress)
    return _convert(Path(source), out_dir, dtype, context_length, model, force, progress)


def _convert(
    path: Path,
    out_dir: Path,
    dtype: DType,
    context_length: int | None,
    model: str | None,
    force: bool,
    progress: Progress,
) -> Artifact:
    with new_artifact_folder(out_dir, force=force) as folder:
        progress("reading the checkpoint", 0, 1)
        checkpoint = open_checkpoint(path)
        description = checkpoint.description
        context = _context(context_length, description.context_length)
        for name, content in checkpoint.tokenizer_files.items():
            (folder / name).write_bytes(content)
        weights = write_weights(
            checkpoint,
            dtype,
            context,
            folder / DATA_FILE,
            lambda done, total: progress("converting weights", done, total),
            open_encoder(folder, checkpoint.tokenizer.added_tokens).encode(smoothing.TEXT),
        )
        write_graph(description, dtype, weights, folder / MODEL_FILE)
        check_epsilon(folder / MODEL_FILE, description.rms_norm_epsilon)
        if dtype == "int8":
            write_graph(description, dtype, weights, folder / AMX_MODEL_FILE, for_amx=True)
            check_epsilon(folder / AMX_MODEL_FILE, description.rms_norm_epsilon)
        progress("writing to the disk", 0, 1)
        write_manifest(
            folder,
            model=model or out_dir.name,
            dtype=dtype,
            context_length=context,
            description=description,
            tokenizer=checkpoint.tokenizer,
            source=Source(name=path.name or str(path), sha256=_source_sha256(path, checkpoint)),
        )
    return load_artifact(out_dir, check_digests=False)


def is_whole(path: Path, dtype: DType) -> bool:
    """Whether an artifact of this type stands complete at a path."""
    try:
        return load_artifact(path, check_digests=False).dtype == dtype
    except ArtifactError:
        return False


def check_epsilon(model_path: Path, wanted: float) -> None:
    """Read RMSNorm's epsilon back from a written graph. Raises ArtifactError where it is not the checkpoint's."""
    found = read_epsilon(model_path)
    if abs(found - wanted) > EPSILON_TOLERANCE * wanted:
        raise ArtifactError(
            f"{model_path} normalizes with epsilon {found}, the checkpoint with {wanted}; convert the model again"
        )


def _check_name(model: str) -> None:
    if not model or model.strip() != model or any(ord(character) < 32 for character in model):
        raise ConversionError(f"model name {model!r} is not usable; give one with --name")


def _context(asked: int | None, limit: int) -> int:
    if asked is None:
        return limit
    if not 1 <= asked <= limit:
        raise ConversionError(f"--context {asked} is outside 1 to {limit}, the checkpoint's context length")
    return asked


def _source_sha256(path: Path, checkpoint: Checkpoint) -> str:
    """The file's digest, or for a folder the digest over names and digests of the files that were read."""
    if path.is_file():
        return file_sha256(path)
    lines = [f"{file_sha256(file)}  {file.name}\n" for file in checkpoint.source_files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
