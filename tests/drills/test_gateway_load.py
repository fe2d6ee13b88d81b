"""Bulk work and chat through a gateway that is killed, over workers and a queue server that are killed.

Clients do what the documentation tells them to: they repeat what failed in a way that passes. Each question has a
number of its own and the null engine answers with the end of the question, so that each answer can be told from all
others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx2
import openai
import pytest

from tests.drills.conftest import SCALE, MakeMill, Record
from tests.drills.mill import PATIENCE_S, Mill, Tally
from tests.drills.served import ServedMill
from tests.drills.test_worker_kills import SOON

CHAT_CLIENTS = 6
BULK_CLIENTS = 2
# Longer than a call takes while everything restarts; far below the settings' own bounds.
CALL_TIMEOUT_S = 60.0
# What the SDKs repeat by themselves.
REPEATED = (408, 409, 429)


class Ledger:
    """What the clients asked and heard. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self.stopping = threading.Event()
        self.answered = Counter[str]()  # kind of call -> how many have their answer
        self.refusals = Counter[str]()  # what clients saw, and what passed when they tried again
        self.lost: list[str] = []
        self.doubled: list[str] = []
        self.wrong: list[str] = []

    def number(self) -> int:
        with self._lock:
            return next(self._numbers)

    def add(self, kind: str, count: int = 1) -> None:
        with self._lock:
            self.answered[kind] += count

    def persist(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Repeat a call until it is answered. What the server says will not pass is raised: clients may not see it."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call(*arguments, **options)
            except (openai.APIError, httpx2.TransportError) as error:
                self._note(error)
                if not will_pass(error) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.05, 0.5))

    def _note(self, error: Exception) -> None:
        code = getattr(error, "code", None)
        name = f"{type(error).__name__} {code}" if code else type(error).__name__
        with self._lock:
            self.refusals[name] += 1


class Broken(openai.APIConnectionError):
    """A stream that ended before its answer did."""

    def __init__(self) -> None:
        super().__init__(request=httpx2.Request("POST", "http://127.0.0.1/v1/chat/completions"))


def will_pass(error: Exception) -> bool:
    """Whether the same call may pass later, by the rules of the SDKs."""
    if not isinstance(error, openai.APIStatusError):
        return True  # the connection broke, or a stream ended with an error
    repeats = error.status_code in REPEATED or error.status_code >= 500
    return repeats and error.response.headers.get("x-should-retry") != "false"


# --- clients ---------------------------------------------------------------------------------------------------------


def chat(client: openai.OpenAI, ledger: Ledger, model: str, seed: int) -> None:
    """One question after the other: whole or streamed, with an idempotency key or without."""
    chance = random.Random(seed)
    while not ledger.stopping.is_set():
        number = ledger.number()
        key = f"call-{number}" if chance.random() < 0.5 else None
        question = Question(client, model, f"What comes after no. {number:08d}?", key)
        ask = stream_answer if chance.random() < 0.4 else whole_answer
        answer = ledger.persist(ask, question)
        if not is_answer(answer[1], question.prompt):
            ledger.wrong.append(f"wrong: {question.prompt!r} was answered {answer[1]!r}")
        if key is not None and chance.random() < 0.3:
            again = ledger.persist(ask, question)
            if again != answer:
                ledger.doubled.append(f"doubled: {key} was answered {answer}, then {again}")
        ledger.add("streamed" if ask is stream_answer else "whole")
        time.sleep(chance.uniform(0.0, 0.1))


@dataclass(frozen=True)
class Question:
    """key: an idempotency key, or None."""

    client: openai.OpenAI
    model: str
    prompt: str
    key: str | None


def is_answer(text: str, prompt: str) -> bool:
    """Whether it is the end of this very prompt."""
    numbers = re.findall(r"\d{8}", prompt)
    return prompt.endswith(text) and bool(numbers) and numbers[0] in text


def whole_answer(question: Question) -> tuple[str, str]:
    """Its id and its text."""
    answer = question.client.completions.create(
        model=question.model, prompt=question.prompt, max_tokens=16, extra_headers=_headers(question.key)
    )
    return answer.id, answer.choices[0].text


def stream_answer(question: Question) -> tuple[str, str]:
    text, answer_id, is_whole = "", "", False
    with question.client.completions.create(
        model=question.model, prompt=question.prompt, max_tokens=16, stream=True, extra_headers=_headers(question.key)
    ) as chunks:
        for chunk in chunks:
            answer_id = chunk.id
            text += chunk.choices[0].text
            is_whole = chunk.choices[0].finish_reason is not None
    if not is_whole:
        raise Broken
    return answer_id, text


def bulk(client: openai.OpenAI, ledger: Ledger, model: str, lines_of_one: int) -> None:
    """One batch after the other: uploaded, made, watched to its end, read."""
    while not ledger.stopping.is_set():
        numbers = [ledger.number() for _ in range(lines_of_one)]
        prompts = {f"r{number}": f"What comes after no. {number:08d}?" for number in numbers}
        content = b"".join(_line(name, prompt, model) for name, prompt in prompts.items())
        file = ledger.persist(client.files.create, file=("bulk.jsonl", content), purpose="batch")
        batch = ledger.persist(
            client.batches.create,
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            extra_headers=_headers(f"batch-{numbers[0]}"),
        )
        deadline = time.monotonic() + PATIENCE_S
        while batch.status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < deadline, f"{batch.id} is still {batch.status}: {batch.request_counts}"
            time.sleep(0.2)
            batch = ledger.persist(client.batches.retrieve, batch.id)
        if (batch.status, batch.request_counts.completed) != ("completed", lines_of_one) or batch.error_file_id:
            ledger.lost.append(f"lost: {batch.id} ended {batch.status} with {batch.request_counts}: {batch.errors}")
            continue
        output = ledger.persist(client.files.content, batch.output_file_id)
        compare(ledger, prompts, [json.loads(row) for row in output.text.splitlines()])
        ledger.add("lines", lines_of_one)


def _line(name: str, prompt: str, model: str) -> bytes:
    body = {"model": model, "prompt": prompt, "max_tokens": 16}
    line = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(line).encode() + b"\n"


def compare(ledger: Ledger, prompts: dict[str, str], lines: list[Any]) -> None:
    """The lines of an output file with the questions."""
    seen = Counter(line["custom_id"] for line in lines)
    ledger.lost += [f"lost: {name} is in no output file" for name in prompts if not seen[name]]
    ledger.doubled += [f"doubled: {name} stands {count} times in it" for name, count in seen.items() if count > 1]
    for line in lines:
        text = line["response"]["body"]["choices"][0]["text"]
        prompt = prompts.get(line["custom_id"], "")
        if not is_answer(text, prompt):
            ledger.wrong.append(f"wrong: {prompt!r} was answered {text!r}")


def _headers(key: str | None) -> dict[str, str]:
    return {"Idempotency-Key": key} if key else {}


# --- the drill -------------------------------------------------------------------------------------------------------


def run_load(mill: Mill, *, seconds: float, workers: int, pause_s: tuple[float, float], lines_of_one: int) -> Ledger:
    """Clients at work, and something killed again and again; then everybody finishes what they have begun."""
    served = ServedMill(mill)
    mill.up(workers=workers)
    served.serve()
    model, ledger = mill.artifact.name, Ledger()
    mill.wait(lambda: mill.scalar("SELECT COUNT(*) FROM workers WHERE status = 'ready'"), "a worker")
    failures: list[BaseException] = []

    def guarded(work: Callable[..., None], *arguments: Any) -> None:
        try:
            with openai.OpenAI(
                base_url=served.url, api_key=served.key(), max_retries=0, timeout=CALL_TIMEOUT_S
            ) as client:
                work(client, ledger, model, *arguments)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(chat, number)) for number in range(CHAT_CLIENTS)]
    threads += [threading.Thread(target=guarded, args=(bulk, lines_of_one)) for _ in range(BULK_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        harm(served, ledger, seconds=seconds, pause_s=pause_s, goes_on=lambda: not failures)
    finally:
        ledger.stopping.set()
        for thread in threads:
            thread.join()
    if failures:
        raise AssertionError(f"a client failed\n{mill.standing()}") from failures[0]
    mill.wait_until_done()
    return ledger


def harm(
    served: ServedMill,
    ledger: Ledger,
    *,
    seconds: float,
    pause_s: tuple[float, float],
    goes_on: Callable[[], bool],
) -> None:
    """Kill the gateway, workers, now and then the queue server, until the time is over."""
    mill = served.mill
    acts = itertools.cycle([kill_gateway, kill_worker, kill_gateway, kill_workers, kill_gateway, kill_queue])
    until = time.monotonic() + seconds

    def has_more_than(before: int) -> bool:
        return ledger.answered.total() > before or not goes_on()

    while goes_on() and time.monotonic() < until:
        mill.wait(partial(has_more_than, ledger.answered.total()), "an answer between two faults")
        time.sleep(mill.random.uniform(*pause_s))
        next(acts)(served)


def kill_gateway(served: ServedMill) -> None:
    served.mill.inject(served.kill)
    time.sleep(served.mill.random.uniform(0.0, 1.0))
    served.serve()


def kill_worker(served: ServedMill) -> None:
    mill = served.mill
    pids = mill.busy_workers()
    if pids:
        with contextlib.suppress(ProcessLookupError):
            mill.inject(lambda: os.kill(mill.random.choice(pids), signal.SIGKILL))


def kill_workers(served: ServedMill) -> None:
    """All that are busy: for a while nobody answers."""
    for pid in served.mill.busy_workers():
        with contextlib.suppress(ProcessLookupError):
            served.mill.inject(partial(os.kill, pid, signal.SIGKILL))


def kill_queue(served: ServedMill) -> None:
    mill = served.mill
    if mill.queue is None:
        mill.inject(lambda: os.kill(mill.queue_server_pid(), signal.SIGKILL))  # its supervisor starts it again
    else:
        mill.inject(mill.queue.kill)
        time.sleep(mill.random.uniform(0.0, 1.0))
        mill.queue.start()
    mill.wait(lambda: _answers(mill), "the queue server's return")


def _answers(mill: Mill) -> bool:
    try:
        return mill.queue_server_pid() > 0
    except Exception as error:
        if isinstance(error, OSError) or type(error).__module__.startswith("redis"):
            return False
        raise


def tally_of(mill: Mill, ledger: Ledger) -> Tally:
    """What the clients found, and what the database says beside it."""
    rows = mill.rows(
        "SELECT requests.id, requests.status, results.id AS result FROM requests "
        "LEFT JOIN results ON results.request_id = requests.id"
    )
    attempts = mill.rows("SELECT request_id, outcome FROM attempts")
    results = Counter(row.id for row in rows)
    completed = Counter(row.request_id for row in attempts if row.outcome == "completed")
    lost = [f"lost: request {row.id} is {row.status} and has no result" for row in rows if row.result is None]
    doubled = [f"doubled: request {number} has {count} results" for number, count in results.items() if count > 1]
    doubled += [f"doubled: request {number} was completed {n} times" for number, n in completed.items() if n > 1]
    repeated = mill.rows(
        "SELECT idempotency_key, COUNT(*) AS n FROM batches WHERE idempotency_key IS NOT NULL "
        "GROUP BY tenant, idempotency_key HAVING COUNT(*) > 1"
    )
    doubled += [f"doubled: {row.idempotency_key} made {row.n} batches" for row in repeated]
    bulk_lines = mill.scalar(
        "SELECT COUNT(*) FROM requests JOIN batches ON batches.id = batch_id WHERE batches.input_file_public_id "
        "IS NOT NULL"
    )
    if bulk_lines != ledger.answered["lines"]:
        doubled.append(f"{bulk_lines} lines of batches are there, and {ledger.answered['lines']} were handed in")
    return Tally(len(rows), len(attempts), [*lost, *ledger.lost], [*doubled, *ledger.doubled], ledger.wrong)


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("database", "queue", "minutes"), [("sqlite", "embedded", 5), ("postgres", "log", 5)])
def test_bulk_and_chat_while_gateway_workers_and_queue_are_killed(
    make_mill: MakeMill, record: Record, database: str, queue: str, minutes: float
) -> None:
    """Ten minutes in all."""
    mill = make_mill(database, queue, faults=[SOON], seed=50)
    ledger = run_load(mill, seconds=minutes * 60 * SCALE, workers=2, pause_s=(0.5, 6.0), lines_of_one=300)
    for kind, count in sorted(ledger.answered.items()):
        print(f"{kind}: {count}")
    print(f"seen by clients, and repeated: {dict(ledger.refusals)}")
    record(mill, "bulk and chat by HTTP; gateway, workers, queue killed", tally=tally_of(mill, ledger))
    assert min(ledger.answered[kind] for kind in ("whole", "streamed", "lines")) > 0


def test_bulk_and_chat_survive_a_killed_gateway(make_mill: MakeMill, record: Record) -> None:
    """One fault of each kind; `make drill` goes on for minutes."""
    mill = make_mill("sqlite", "embedded", faults=[SOON], settings={"ENGINE_NULL_TOKEN_S": "0.005"}, seed=51)
    ledger = run_load(mill, seconds=6.0, workers=1, pause_s=(0.0, 0.5), lines_of_one=100)
    record(mill, "bulk and chat by HTTP (short)", tally=tally_of(mill, ledger))
    assert min(ledger.answered[kind] for kind in ("whole", "streamed", "lines")) > 0
