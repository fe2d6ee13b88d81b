"""Artifacts: the folder a worker loads, and the manifest that says what is in it.

    model.onnx, model.onnx.data     graph and weights
    model.amx.onnx                  int8: the graph over the same weights for processors with AMX
    tokenizer.json | tokenizer.model
    chat_template.jinja             where the checkpoint has one
    manifest.json                   everything else, with size and SHA-256 of every file

An artifact is written into a folder beside its place and renamed at the very end, so what carries the name is whole.
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from workers.models.description import DTYPES, DType, ModelDescription, TokenizerDescription, quantization_of
from workers.models.errors import ArtifactError, ConversionError

FORMAT = 1
MANIFEST_FILE = "manifest.json"
MODEL_FILE = "model.onnx"
AMX_MODEL_FILE = "model.amx.onnx"
CHAT_TEMPLATE_FILE = "chat_template.jinja"

_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Source:
    """Where an artifact came from. sha256: of the file, or over the files of a folder."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Artifact:
    """A whole artifact on disk. context_length: the longest prompt plus answer. digest: names exactly this content."""

    path: Path
    model: str
    dtype: DType
    context_length: int
    description: ModelDescription
    tokenizer: TokenizerDescription
    source: Source
    files: Mapping[str, FileEntry]
    digest: str

    @property
    def model_path(self) -> Path:
        return self.path / MODEL_FILE


def load_artifact(path: Path, *, check_digests: bool) -> Artifact:
    """Read and check an artifact; sizes always, contents when asked (reads every byte).

    Raises ArtifactError naming the file, what was wanted and what was found.
    """
    manifest = _read_manifest(path)
    try:
        artifact = Artifact(
            path=path,
            model=str(manifest["model"]),
            dtype=manifest["dtype"],
            context_length=int(manifest["context_length"]),
            description=ModelDescription.from_json(manifest["description"]),
            tokenizer=TokenizerDescription.from_json(manifest["tokenizer"]),
            source=Source(**manifest["source"]),
            files={name: FileEntry(**entry) for name, entry in manifest["files"].items()},
            digest=str(manifest["digest"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ArtifactError(f"{path / MANIFEST_FILE} is damaged ({error!r}); convert the model again") from error
    if artifact.dtype not in DTYPES:
        raise ArtifactError(f"{path / MANIFEST_FILE}: dtype {artifact.dtype} is unknown; convert the model again")
    for name, entry in artifact.files.items():
        _check_file(path / name, entry, check_digests)
    return artifact


def kv_bytes_per_token(description: ModelDescription) -> int:
    """Memory that one token of context takes in a float32 KV cache, over all layers."""
    return description.num_layers * 2 * description.kv_size * 4


@contextlib.contextmanager
def new_artifact_folder(out_dir: Path, *, force: bool) -> Iterator[Path]:
    """Give a folder to write an artifact into; it takes the name out_dir when the block ends without an error.

    force: replace what is there. Raises ConversionError where it must not or cannot be written.
    """
    if out_dir.exists() and not force:
        raise ConversionError(f"{out_dir} already exists; choose another folder, or replace it with --force")
    if force and out_dir.is_dir() and any(out_dir.iterdir()) and not (out_dir / MANIFEST_FILE).exists():
        raise ConversionError(f"{out_dir} is not an artifact (no {MANIFEST_FILE}); --force replaces artifacts only")
    partial = out_dir.parent / f".{out_dir.name}.{os.getpid()}.partial"
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(out_dir)
        partial.mkdir()
        yield partial
        _move_into_place(partial, out_dir)
    except OSError as error:
        free_mib = _free_mib(out_dir)
        raise ConversionError(
            f"cannot write {out_dir}: {error.strerror or error} ({free_mib} MiB free there); "
            "free some space or choose another folder"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_manifest(
    folder: Path,
    *,
    model: str,
    dtype: DType,
    context_length: int,
    description: ModelDescription,
    tokenizer: TokenizerDescription,
    source: Source,
) -> None:
    """Describe the files of a folder that is otherwise complete, and force everything to the disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        files[path.name] = {"sha256": file_sha256(path), "size_bytes": path.stat().st_size}
        _sync(path)
    stored = ("embedding.weight", "layers.0.attention.qkv.weight", "layers.0.mlp.up.weight", "head.weight")
    quantization = {name: vars(form) for name in stored if (form := quantization_of(name, dtype)) is not None}
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "promptmill_version": version("promptmill"),
        "model": model,
        "dtype": dtype,
        "quantization": quantization,
        "context_length": context_length,
        "description": description.to_json(),
        "tokenizer": tokenizer.to_json(),
        "source": vars(source),
        "files": files,
    }
    manifest["digest"] = _digest(manifest)
    path = folder / MANIFEST_FILE
    path.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _sync(path)
    _sync(folder)


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _read_manifest(path: Path) -> dict[str, Any]:
    manifest_path = path / MANIFEST_FILE
    if not path.is_dir():
        raise ArtifactError(f"{path} is not a folder; an artifact is a folder that `promptmill convert` wrote")
    try:
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{path} has no {MANIFEST_FILE}: it is not an artifact, or was not copied whole; convert the model again"
        ) from error
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{manifest_path} cannot be read ({error}); convert the model again") from error
    found = manifest.get("format") if isinstance(manifest, dict) else None
    if not isinstance(found, int):
        raise ArtifactError(f"{manifest_path} is damaged: it has no format number; convert the model again")
    if found > FORMAT:
        raise ArtifactError(
            f"{manifest_path} has format {found}, this version reads up to {FORMAT}; "
            "upgrade promptmill, or convert the model again"
        )
    wanted = manifest.get("digest")
    if wanted != _digest(manifest):
        raise ArtifactError(
            f"{manifest_path} was changed since it was written: wanted digest {wanted}, found {_digest(manifest)}; "
            "convert the model again"
        )
    return dict(manifest)


def _check_file(path: Path, entry: FileEntry, check_digest: bool) -> None:
    try:
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise ArtifactError(
                f"{path} has {size} bytes, wanted {entry.size_bytes}: it was cut short or changed; "
                "convert the model again"
            )
        if check_digest and (found := file_sha256(path)) != entry.sha256:
            raise ArtifactError(
                f"{path} was changed since it was written: wanted SHA-256 {entry.sha256}, found {found}; "
                "convert the model again"
            )
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} is missing; convert the model again") from error
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error


def _digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over the manifest, which holds the digests of all files; equal content gives an equal digest."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _move_into_place(partial: Path, out_dir: Path) -> None:
    """Rename the finished folder; an artifact it replaces goes only after the new one stands."""
    replaced = out_dir.parent / f".{out_dir.name}.{os.getpid()}.replaced.partial"
    if out_dir.exists():
        out_dir.rename(replaced)
    partial.rename(out_dir)
    _sync(out_dir.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _remove_abandoned(out_dir: Path) -> None:
    """Remove what conversions that were killed left beside the place of this artifact."""
    for folder in out_dir.parent.glob(f".{out_dir.name}.*.partial"):
        process_id = folder.name.removeprefix(f".{out_dir.name}.").partition(".")[0]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            shutil.rmtree(folder, ignore_errors=True)


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk. Windows has no folder handles to sync."""
    if os.name == "nt" and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_mib(path: Path) -> int:
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free >> 20
