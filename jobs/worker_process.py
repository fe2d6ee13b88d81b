"""A worker as a child process: started with the same settings, watched, told to stop.

It gets a process group of its own, so that Ctrl-C at the terminal reaches its parent alone, which stops it in order.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

from jobs.settings import Settings, environment_of

# What a dying worker last wrote to standard error that is worth showing.
TAIL_BYTES = 4000
TAIL_LINES = 12


class WorkerProcess:
    """A running `promptmill worker`. artifact: the folder it serves. log_file: where its standard error goes."""

    def __init__(self, settings: Settings, artifact: Path) -> None:
        settings.logs_dir.mkdir(parents=True, exist_ok=True)
        self.log_file = settings.logs_dir / f"worker-{os.getpid()}.stderr.log"
        self._log: IO[bytes] = self.log_file.open("ab")
        self._log_start = self._log.tell()
        self.started_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "workers", "worker", "--artifact", str(artifact), "--parent-pid", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **environment_of(settings)},
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._process.poll()

    def stop(self, patience_s: float) -> None:
        """Ask it to drain and leave; kill it when that takes longer than `patience_s`."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(patience_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def last_words(self) -> str:
        """The end of what this process wrote to standard error."""
        data = self.log_file.read_bytes()[self._log_start :][-TAIL_BYTES:]
        return "\n".join(data.decode("utf-8", "replace").strip().splitlines()[-TAIL_LINES:])
