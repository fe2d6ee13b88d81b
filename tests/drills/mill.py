"""One promptmill that a drill runs and harms: real processes, a home of its own, work whose answers are known.

Each prompt ends in a number of its own and the null engine answers with the end of the prompt, so that a lost, a
doubled and a wrong answer can be told apart for every single request.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from sqlalchemy import text

from jobs.inputs import InputOptions
from jobs.queue import own_queue_name
from jobs.source import open_source
from jobs.submit import BatchOptions, submit
from storage.database import Database, open_database, upgrade_schema
from storage.errors import StorageError
from tests.drills.servers import Postgres, QueueServer

ROOT = Path(__file__).parent.parent.parent
WRAPPER = Path(__file__).with_name("wrapped.py")
# Far longer than anything here takes, also on a machine with much else to do.
PATIENCE_S = 600.0
# With 16 tokens an answer and 64 rows: 200 requests/s a worker, so that its hands are full when it is hit.
TOKEN_S = 0.02

SETTINGS = {
    "ENGINE_FLAVOUR": "null",
    "ENGINE_NULL_TOKEN_S": str(TOKEN_S),
    "ENGINE_MAX_BATCH_SIZE": "64",
    "ENGINE_CONTEXT_LENGTH": "128",
    "WORKER_DRAIN_S": "5",
}


@dataclass(frozen=True)
class Tally:
    """What became of the requests. lost, doubled, wrong: a sentence for each that was."""

    requests: int
    attempts: int
    lost: list[str]
    doubled: list[str]
    wrong: list[str]
    failed: Mapping[str, int] = field(default_factory=dict)  # error code -> requests

    @property
    def reworked_percent(self) -> float:
        return 100.0 * max(0, self.attempts - self.requests) / max(1, self.requests)

    def explain(self) -> str:
        return "\n".join([*self.lost[:10], *self.doubled[:10], *self.wrong[:10]])


class Mill:
    """Use as `with Mill(...) as mill`. queue: a server of the drill's; None: the embedded one of the home.

    settings: without their prefix, over SETTINGS. faults: what `wrapped.py` plants.
    """

    def __init__(
        self,
        folder: Path,
        artifact: Path,
        *,
        database: Postgres | None = None,
        queue: QueueServer | None = None,
        settings: Mapping[str, str] | None = None,
        faults: Sequence[Mapping[str, Any]] = (),
        seed: int = 0,
    ) -> None:
        self.folder = folder
        self.home = folder / "home"
        self.artifact = artifact
        self.queue = queue
        self.postgres = database
        self.random = random.Random(seed)
        self.faults: list[float] = []  # when each was injected
        self.planted = list(faults)
        self.settings = {**SETTINGS, **(settings or {})}
        self.home.mkdir(parents=True, exist_ok=True)
        self.database_url = database.url() if database else f"sqlite:///{self.home / 'promptmill.db'}"
        self.database: Database = open_database(self.database_url)
        upgrade_schema(self.database)
        self.expected: dict[str, str] = {}  # custom_id -> answer, where the null engine is not the one that answers
        self._prompts: dict[str, str] = {}  # custom_id -> prompt
        self._processes: list[subprocess.Popen[bytes]] = []
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._began = time.monotonic()

    # --- processes ---

    def environment(self) -> dict[str, str]:
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")}
        ours |= {f"PROMPTMILL_{name}": value for name, value in self.settings.items()}
        ours |= {"PROMPTMILL_HOME": str(self.home), "PROMPTMILL_DATABASE_URL": self.database_url}
        if self.queue is not None:
            ours["PROMPTMILL_QUEUE_URL"] = self.queue.url
        return ours | {"DRILL_FAULTS": json.dumps(self.planted), "PYTHONPATH": str(ROOT)}

    def start(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start `promptmill ARGUMENTS`; what it says goes to `<command>.out` in the drill's folder."""
        module = "workers" if arguments[0] == "worker" else "jobs.cli"
        with (self.folder / f"{arguments[0]}.out").open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, str(WRAPPER), module, *map(str, arguments)],
                cwd=self.folder,
                env={**self.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def run(self, *arguments: str | Path, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Run `promptmill ARGUMENTS` to its end. Returns its exit code, and what it said."""
        said = self.folder / f"{arguments[0]}.out"
        start = said.stat().st_size if said.exists() else 0
        code = self.start(*arguments, environment=environment).wait(PATIENCE_S)
        return code, said.read_bytes()[start:].decode(errors="replace")

    def up(self, workers: int = 1) -> subprocess.Popen[bytes]:
        """Start a supervisor; as long as the drill does not end it, it has to live."""
        self._supervisor = self.start("up", "--model", self.artifact, "--workers", str(workers))
        return self._supervisor

    def end(self, process: subprocess.Popen[bytes], signum: int = signal.SIGKILL) -> int:
        """Send a signal to a process of ours and wait for its end. Returns its exit code."""
        if process is self._supervisor:
            self._supervisor = None
        process.send_signal(signum)
        return process.wait(PATIENCE_S)

    def worker(self) -> subprocess.Popen[bytes]:
        return self.start("worker", "--artifact", self.artifact)

    def own_queues(self) -> dict[str, int]:
        """Messages that wait in workers' own queues, by place; of places that were sent something."""
        name = self.artifact.name
        try:
            with self.queue_client() as client:
                places = [place.decode() for place in client.smembers(f"promptmill.{name}.places")]
                return {place: client.llen(own_queue_name(name, place)) for place in places}
        except redis.RedisError:
            return {}

    @property
    def queue_socket(self) -> Path:
        """Of the embedded queue server."""
        return self.home / "run" / "queue.sock"

    def queue_client(self) -> redis.Redis:
        if self.queue is not None:
            return self.queue.client()
        return redis.Redis(unix_socket_path=str(self.queue_socket))

    def wipe(self) -> None:
        with self.queue_client() as client:
            client.flushall()

    def queue_server_pid(self) -> int:
        with self.queue_client() as client:
            return int(client.info("server")["process_id"])

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for leftover in self.leftovers():
            with contextlib.suppress(psutil.Error):
                leftover.kill()
        if self.queue is None:
            # Once, without the client's usual retries: it takes the server's end for a lost connection.
            client = redis.Redis(unix_socket_path=str(self.queue_socket), retry=Retry(NoBackoff(), 0))
            with contextlib.suppress(redis.RedisError, OSError), client:
                client.shutdown(nosave=True)
        self.database.close()

    def leftovers(self) -> Iterator[psutil.Process]:
        """Processes of this home that still run."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                is_ours = process.environ().get("PROMPTMILL_HOME") == str(self.home)
                if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def __enter__(self) -> Mill:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- work ---

    def submit(self, count: int, *, ends: Mapping[int, str] | None = None, twins: int = 0, **options: Any) -> int:
        """Hand in so many prompts. Returns the batch's row id. ends: what stands in the prompts at these places.

        twins: as many more lines that ask what the first one asks. options: of the batch. The drill's own process
        submits; processes that die while they submit have a drill of their own.
        """
        path = self.write_prompts(count, ends, twins)
        with open_source(path, self.folder) as source:
            return submit(
                self.database, source, InputOptions(model=self.artifact.name), BatchOptions(**options)
            ).batch.id

    def write_prompts(self, count: int, ends: Mapping[int, str] | None = None, twins: int = 0) -> Path:
        """A file of so many prompts that were never asked before."""
        first = len(self._prompts)
        path = self.folder / f"prompts-{first}.jsonl"
        with path.open("w") as file:
            for place in range(count + twins):
                number = first + (place if place < count else 0)
                prompt = f"What comes after {(ends or {}).get(place, '')}no. {number:08d}?"
                self._prompts[f"r{first + place}"] = prompt
                body = {"model": self.artifact.name, "prompt": prompt, "max_tokens": 16}
                line = {
                    "custom_id": f"r{first + place}",
                    "method": "POST",
                    "url": "/v1/completions",
                    "body": body | ({"temperature": 0} if twins else {}),
                }
                file.write(json.dumps(line) + "\n")
        return path

    def keep_busy(self, batch_of: int = 2000) -> None:
        """See to it that there is enough left to do while more faults are coming."""
        if self.scalar("SELECT COUNT(*) FROM requests WHERE status IN ('pending', 'queued')") < batch_of // 4:
            self.submit(batch_of)

    def is_done(self) -> bool:
        """Whether no batch is open."""
        return not self.scalar(
            "SELECT COUNT(*) FROM batches WHERE status NOT IN ('completed', 'failed', 'expired', 'cancelled')"
        )

    def wait_until_done(self, seconds: float = PATIENCE_S) -> None:
        """Until no batch is open. The drill fails here when something was lost."""
        self.wait(self.is_done, "the end of all batches", seconds)

    def wait_for_answers(self, count: int) -> None:
        """Until so many more requests have a result than now."""
        wanted = self.scalar("SELECT COUNT(*) FROM results") + count
        self.wait(lambda: self.scalar("SELECT COUNT(*) FROM results") >= wanted, f"{count} more answers")

    def wait(self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
        deadline = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < deadline, f"{what} did not come within {seconds:g} s\n{self.standing()}"
            if self._supervisor is not None and (code := self._supervisor.poll()) is not None:
                said = (self.folder / "up.out").read_text(errors="replace")[-2000:]
                raise AssertionError(f"the supervisor ended with {code} while {what} was awaited:\n{said}")
            time.sleep(0.05)
        return found

    def inject(self, act: Callable[[], Any]) -> Any:
        """Do something bad, and note when."""
        self.faults.append(time.time())
        return act()

    def busy_workers(self) -> list[int]:
        """Process ids of workers that have requests in their hands and still live."""
        rows = self.rows(
            "SELECT DISTINCT workers.pid FROM requests JOIN workers ON workers.name = requests.worker "
            "WHERE requests.status = 'running'"
        )
        return sorted(row.pid for row in rows if _lives(row.pid))

    def pick_busy_worker(self, within_s: float = 1.5, *, batch_of: int = 2000) -> int:
        """One of the busy workers, at a random moment of its work. When there is no more to do, more is handed in.

        batch_of: how much; 0: nothing.
        """

        def busy_ones() -> list[int]:
            found = self.busy_workers()
            if not found and batch_of:
                self.keep_busy(batch_of)
            return found

        self.wait(busy_ones, "a busy worker")
        time.sleep(self.random.uniform(0.0, within_s))
        return self.random.choice(self.wait(busy_ones, "a busy worker"))

    def wait_for_recovery(self) -> None:
        """Until something was claimed after the last fault, or all is done."""
        claimed = "SELECT COUNT(*) FROM requests WHERE claimed_at > :at"
        self.wait(
            lambda: self.scalar(claimed, at=self.faults[-1]) or self.is_done(),
            "a claim after the fault",
        )

    # --- what became of it ---

    def rows(self, query: str, **values: Any) -> Sequence[Any]:
        """Rows of the database. A database that is away or busy is asked again."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with self.database.read() as connection:
                    return connection.execute(text(query), values).all()
            except StorageError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)

    def scalar(self, query: str, **values: Any) -> int:
        return int(self.rows(query, **values)[0][0])

    def tally(self) -> Tally:
        """Look at every request that was accepted: in the database, in the counters, in the output files."""
        requests = self.rows(
            "SELECT requests.id, custom_id, requests.status, response, error_code, results.id AS result "
            "FROM requests LEFT JOIN results ON results.request_id = requests.id ORDER BY requests.id"
        )
        attempts = self.rows("SELECT request_id, outcome FROM attempts")
        lost = [
            f"lost: {row.custom_id} (request {row.id}) is {row.status} and has no result"
            for row in requests
            if row.result is None
        ]
        known = {row.custom_id for row in requests}
        lost += [f"lost: {name} was submitted and is no row" for name in self._prompts if name not in known]
        seen = Counter(row.id for row in requests)
        doubled = [f"doubled: request {request} has {count} results" for request, count in seen.items() if count > 1]
        completed = Counter(row.request_id for row in attempts if row.outcome == "completed")
        doubled += [f"doubled: request {number} was completed {n} times" for number, n in completed.items() if n > 1]
        wrong = []
        for row in requests:
            if row.result is not None and row.error_code is None:
                said = json.loads(row.response)["choices"][0]["text"]
                if not self._follows(row.custom_id, said):
                    asked = self._prompts.get(row.custom_id)
                    wrong.append(f"wrong: {row.custom_id} was answered {said!r}, asked {asked!r}")
        self._compare_batches(requests, lost, doubled, wrong)
        failed = Counter(row.error_code for row in requests if row.error_code is not None)
        return Tally(len(requests), len(attempts), lost, doubled, wrong, failed)

    def recovery_s(self) -> list[float]:
        """For each fault: how long until a request that was claimed after it was answered."""
        done = self.rows(
            "SELECT claimed_at, finished_at FROM attempts WHERE outcome = 'completed' AND served_from IS NULL "
            "ORDER BY claimed_at"
        )
        found = []
        for at in self.faults:
            after = [row.finished_at for row in done if row.claimed_at > at]
            if after:
                found.append(min(after) - at)
        return found

    def events(self) -> Counter[str]:
        """How often each event stands in the logs of all processes."""
        found: Counter[str] = Counter()
        for path in sorted((self.home / "logs").glob("*.log*")):
            found.update(re.findall(r'"event": ?"([a-z_]+)"', path.read_text(errors="replace")))
        return found

    def says(self, words: str) -> bool:
        """Whether a log of the home, or what a process printed, has these words."""
        logs = [*(self.home / "logs").glob("*.log*"), *self.folder.glob("*.out")]
        return any(words in path.read_text(errors="replace") for path in logs)

    def standing(self) -> str:
        """Where everything is when something did not come: for the message of a failed drill."""
        try:
            by_status = self.rows("SELECT status, COUNT(*) AS n, MIN(id) AS first FROM requests GROUP BY status")
            batches = self.rows("SELECT id, status, total_requests, completed_requests, failed_requests FROM batches")
        except StorageError as error:
            return error.message
        return f"requests: {by_status}\nbatches: {batches}\nevents: {dict(self.events())}\nlogs: {self.home / 'logs'}"

    def _follows(self, custom_id: str, said: str) -> bool:
        if custom_id in self.expected:
            return said == self.expected[custom_id]
        prompt = self._prompts.get(custom_id, "")
        number = re.findall(r"\d{8}", prompt)
        return bool(number) and prompt.endswith(said) and number[0] in said

    def _compare_batches(self, requests: Sequence[Any], lost: list[str], doubled: list[str], wrong: list[str]) -> None:
        """The counters and the files of each batch must say what its requests say."""
        of_batch = self.rows("SELECT id, batch_id, custom_id, status FROM requests")
        files = {row.id: row for row in self.rows("SELECT id, path, lines FROM files")}
        for batch in self.rows(
            "SELECT id, public_id, status, total_requests, completed_requests, failed_requests, output_file_id, "
            "error_file_id FROM batches"
        ):
            counts = Counter(row.status for row in of_batch if row.batch_id == batch.id)
            wanted = (sum(counts.values()), counts["completed"], counts["failed"])
            told = (batch.total_requests, batch.completed_requests, batch.failed_requests)
            for name, has, says in zip(("total", "completed", "failed"), wanted, told, strict=True):
                if has != says:
                    kind = lost if says < has else doubled
                    kind.append(f"counter: {batch.public_id} counts {says} {name} requests and has {has}")
            if batch.status not in ("completed", "expired", "cancelled"):
                continue
            lines: list[dict[str, Any]] = []
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    content = (self.home / "files" / files[file_id].path).read_text()
                    lines += [json.loads(line) for line in content.splitlines()]
            written = Counter(line["custom_id"] for line in lines)
            lost += [
                f"lost: {row.custom_id} is in no file of {batch.public_id}"
                for row in of_batch
                if row.batch_id == batch.id and not written[row.custom_id]
            ]
            doubled += [f"doubled: {name} stands {n} times in its file" for name, n in written.items() if n > 1]
            for line in lines:
                body = (line["response"] or {}).get("body", {})
                if "choices" in body and not self._follows(line["custom_id"], body["choices"][0]["text"]):
                    wrong.append(f"wrong: {line['custom_id']} in the file of {batch.public_id}")


@dataclass(frozen=True)
class Row:
    """A row of the matrix."""

    group: str
    database: str
    queue: str
    requests: int
    faults: int
    lost: int
    doubled: int
    wrong: int
    reworked_percent: float
    recovery_median_s: float | None
    recovery_most_s: float | None
    took_s: float


def judge_drill(mill: Mill, group: str, *, allowed_failures: Sequence[str] = (), tally: Tally | None = None) -> Row:
    """The drill's row; fails, saying what was lost, when anything was.

    allowed_failures: error codes that some requests are meant to end with. tally: the drill's own, in place of the
    mill's.
    """
    tally = tally or mill.tally()
    recovery = mill.recovery_s()
    row = Row(
        group=group,
        database="Postgres" if mill.postgres else "SQLite",
        queue=mill.queue.name if mill.queue else "embedded",
        requests=tally.requests,
        faults=len(mill.faults),
        lost=len(tally.lost),
        doubled=len(tally.doubled),
        wrong=len(tally.wrong),
        reworked_percent=round(tally.reworked_percent, 1),
        recovery_median_s=round(statistics.median(recovery), 1) if recovery else None,
        recovery_most_s=round(max(recovery), 1) if recovery else None,
        took_s=round(time.monotonic() - mill._began, 1),
    )
    unexpected = {code: count for code, count in tally.failed.items() if code not in allowed_failures}
    assert not (tally.lost or tally.doubled or tally.wrong or unexpected), (
        f"{row}\nfailed: {unexpected}\n{tally.explain()}\n{mill.standing()}"
    )
    return row


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
