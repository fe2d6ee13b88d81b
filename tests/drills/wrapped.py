"""Starts a promptmill process with faults planted in it: `python wrapped.py MODULE ARGUMENTS...`.

Nothing in the product knows of this. What is to be planted stands in the environment as JSON (DRILL_FAULTS): a list of
faults, each with a `kind` and with the `roles` it is for (`up`, `tick`, `submit`, `worker`, ...). Workers that `up`
starts are wrapped as well.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "DRILL_FAULTS"
FAULTS: dict[str, Callable[..., None]] = {}


def fault(plant: Callable[..., None]) -> Callable[..., None]:
    """A kind of fault, by its function's name; the other keys of its JSON object are the arguments."""
    FAULTS[plant.__name__] = plant
    return plant


def main() -> None:
    sys.path.pop(0)  # this file's folder: its neighbours must not hide modules of the same name
    module, *arguments = sys.argv[1:]
    wrap_workers()
    for each in json.loads(os.environ.get(VARIABLE, "[]")):
        given: dict[str, Any] = dict(each)
        kind, roles = given.pop("kind"), given.pop("roles")
        if arguments[0] in roles:
            FAULTS[kind](**given)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def wrap_workers() -> None:
    """Let the workers that this process starts be wrapped too."""

    class Popen(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, args: Any, *more: Any, **options: Any) -> None:
            if isinstance(args, list) and args[1:4] == ["-m", "workers", "worker"]:
                args = [args[0], __file__, *args[2:]]
            super().__init__(args, *more, **options)

    subprocess.Popen = Popen  # type: ignore[misc]


# --- death at a commit -------------------------------------------------------------------------------------------


@fault
def crash_at_commit(log: str, point: str = "", nth: int = 0, when: str = "") -> None:
    """Die by SIGKILL at the nth commit of a commit point. In the folder `log` each point has a file, a byte a commit.

    A commit point is a function that makes a write transaction, `module:function`. when: `before` the commit, with all
    statements of the transaction made, or `after` it. Without a point nothing dies.
    """
    from storage.database import Database

    folder = Path(log)
    met: Counter[str] = Counter()
    lock = threading.Lock()
    write = Database.write

    def die_if_it_is_time(name: str, number: int, moment: str) -> None:
        if (name, number, moment) == (point, nth, when):
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)  # the signal is on its way: nothing more must happen

    @contextmanager
    def write_and_die(database: Database, *, durable: bool = True) -> Iterator[Any]:
        name = _caller()
        with lock:
            met[name] += 1
            number = met[name]
        with (folder / name).open("ab") as file:
            file.write(b".")
        with write(database, durable=durable) as connection:
            yield connection
            die_if_it_is_time(name, number, "before")
        die_if_it_is_time(name, number, "after")

    Database.write = write_and_die  # type: ignore[method-assign]


@fault
def small_groups(lines: int) -> None:
    """A submission commits after so many lines."""
    import jobs.submit

    jobs.submit.GROUP_LINES = lines


def _caller() -> str:
    """The function that asked for the transaction, as `module:function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name not in ("storage.database", "contextlib", __name__):
            return f"{name}:{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "unknown"


# --- prompts that harm -------------------------------------------------------------------------------------------


@fault
def engine_dies_on(marker: list[int]) -> None:
    """The process ends at once when the engine gives a token to a prompt that holds these token ids."""
    _on_marker(marker, lambda: os._exit(139))


@fault
def engine_hangs_on(marker: list[int]) -> None:
    """The engine's thread never comes back from a prompt that holds these token ids."""
    _on_marker(marker, lambda: time.sleep(3600))


@fault
def engine_loses_device_on(marker: list[int]) -> None:
    """The device runs nothing any more after a prompt that holds these token ids, as CUDA after an illegal access."""
    from storage.errors import PromptmillError
    from workers.engine.request import DEVICE_FAILED

    def lose() -> None:
        raise PromptmillError("the device is gone", code=DEVICE_FAILED, retryable=True)

    _on_marker(marker, lose)


def _on_marker(marker: list[int], harm: Callable[[], None]) -> None:
    from workers.engine.null import NullEngine

    step = NullEngine._step
    wanted = tuple(marker)

    def harmful_step(engine: NullEngine, row: Any, *more: Any) -> Any:
        prompt = tuple(row.request.prompt_token_ids)
        if any(prompt[start : start + len(wanted)] == wanted for start in range(len(prompt) - len(wanted) + 1)):
            harm()
        return step(engine, row, *more)

    NullEngine._step = harmful_step  # type: ignore[method-assign]


# --- surroundings ------------------------------------------------------------------------------------------------


@fault
def restarts_soon(longest_s: float) -> None:
    """Dead workers are started again without the long pauses that a series of deaths earns them."""
    import jobs.worker_process

    jobs.worker_process.LONGEST_RESTART_PAUSE_S = longest_s


@fault
def looks_for_lost_messages_soon(after_s: float) -> None:
    """What was sent so long ago, and is neither in the queue nor claimed, counts as lost; in real life after 30 s."""
    import jobs.sweep

    jobs.sweep.LOST_AFTER_S = jobs.sweep.CLAIMED_WITHIN_S = after_s


@fault
def clock_jumps(by_s: float, when_there_is: str) -> None:
    """The wall clock jumps as soon as that file is there, for all processes at once; the steady clock goes on."""
    real, signal_file = time.time, Path(when_there_is)

    def jumped() -> float:
        return real() + (by_s if signal_file.exists() else 0.0)

    time.time = jumped


if __name__ == "__main__":
    main()
