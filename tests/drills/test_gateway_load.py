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
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx2
import openai
import pytest

from tests.drills.conftest import SCALE, MakeMill, Record
from tests.drills.mill import PATIENCE_S, Mill, Tally
from tests.drills.served import ServedMill
from tests.drills.test_queue_faults import answers
from tests.drills.test_worker_kills import SOON

CHAT_CLIENTS = 6
BULK_CLIENTS = 2
# Longer than a call takes while everything restarts; far below the settings' own bounds.
CALL_TIMEOUT_S = 60.0
# In the order in which things are killed, again and again.
ACTS = ("gateway", "worker", "gateway", "all workers", "gateway", "queue")
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

    def note(self, error: Exception) -> None:
        code = getattr(error, "code", None)
        name = f"{type(error).__name__} {code}" if code else type(error).__name__
        with self._lock:
            self.refusals[name] += 1


class Caller:
    """One client's way to the gateways: each try goes to any of them, as through a proxy before them."""

    def __init__(self, ledger: Ledger, clients: Sequence[openai.OpenAI]) -> None:
        self._ledger = ledger
        self._clients = clients

    def persist(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Repeat `call(client, ...)` until it is answered.

        What the server says will not pass is raised: no client may see it.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call(random.choice(self._clients), *arguments)
            except (openai.APIError, httpx2.TransportError) as error:
                self._ledger.note(error)
                if not will_pass(error) or time.monotonic() > deadline:
                    raise
            time.sleep(random.uniform(0.05, 0.5))


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


def chat(caller: Caller, ledger: Ledger, model: str, seed: int) -> None:
    """One question after the other: whole or streamed, with an idempotency key or without."""
    chance = random.Random(seed)
    while not ledger.stopping.is_set():
        number = ledger.number()
        key = f"call-{number}" if chance.random() < 0.5 else None
        prompt = f"What comes after no. {number:08d}?"
        ask = stream_answer if chance.random() < 0.4 else whole_answer
        answer = caller.persist(ask, model, prompt, key)
        if not is_answer(answer[1], prompt):
            ledger.wrong.append(f"wrong: {prompt!r} was answered {answer[1]!r}")
        if key is not None and chance.random() < 0.3:
            again = caller.persist(ask, model, prompt, key)
            if again != answer:
                ledger.doubled.append(f"doubled: {key} was answered {answer}, then {again}")
        ledger.add("streamed" if ask is stream_answer else "whole")
        time.sleep(chance.uniform(0.0, 0.1))


def is_answer(text: str, prompt: str) -> bool:
    """Whether it is the end of this very prompt."""
    numbers = re.findall(r"\d{8}", prompt)
    return prompt.endswith(text) and bool(numbers) and numbers[0] in text


def whole_answer(client: openai.OpenAI, model: str, prompt: str, key: str | None) -> tuple[str, str]:
    """Its id and its text."""
    answer = client.completions.create(model=model, prompt=prompt, max_tokens=16, extra_headers=_headers(key))
    return answer.id, answer.choices[0].text


def stream_answer(client: openai.OpenAI, model: str, prompt: str, key: str | None) -> tuple[str, str]:
    text, answer_id, is_whole = "", "", False
    with client.completions.create(
        model=model, prompt=prompt, max_tokens=16, stream=True, extra_headers=_headers(key)
    ) as chunks:
        for chunk in chunks:
            answer_id = chunk.id
            text += chunk.choices[0].text
            is_whole = chunk.choices[0].finish_reason is not None
    if not is_whole:
        raise Broken
    return answer_id, text


def bulk(caller: Caller, ledger: Ledger, model: str, lines_of_one: int) -> None:
    """One batch after the other: uploaded, made, watched to its end, read."""
    while not ledger.stopping.is_set():
        numbers = [ledger.number() for _ in range(lines_of_one)]
        prompts = {f"r{number}": f"What comes after no. {number:08d}?" for number in numbers}
        content = b"".join(_line(name, prompt, model) for name, prompt in prompts.items())
        file = caller.persist(upload, content)
        batch = caller.persist(create_batch, file.id, f"batch-{numbers[0]}")
        deadline = time.monotonic() + PATIENCE_S
        while batch.status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < deadline, f"{batch.id} is still {batch.status}: {batch.request_counts}"
            time.sleep(0.2)
            batch = caller.persist(get_batch, batch.id)
        if (batch.status, batch.request_counts.completed) != ("completed", lines_of_one) or batch.error_file_id:
            ledger.lost.append(f"lost: {batch.id} ended {batch.status} with {batch.request_counts}: {batch.errors}")
            continue
        output = caller.persist(get_content, batch.output_file_id)
        compare(ledger, prompts, [json.loads(row) for row in output.splitlines()])
        ledger.add("lines", lines_of_one)


def upload(client: openai.OpenAI, content: bytes) -> Any:
    return client.files.create(file=("bulk.jsonl", content), purpose="batch")


def create_batch(client: openai.OpenAI, file_id: str, key: str) -> Any:
    return client.batches.create(
        input_file_id=file_id, endpoint="/v1/completions", completion_window="24h", extra_headers=_headers(key)
    )


def get_batch(client: openai.OpenAI, batch_id: str) -> Any:
    return client.batches.retrieve(batch_id)


def get_content(client: openai.OpenAI, file_id: str) -> str:
    return client.files.content(file_id).text


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


def run_load(
    mill: Mill,
    *,
    seconds: float,
    gateways: int,
    workers: int,
    lines_of_one: int,
    pause_s: tuple[float, float] = (0.5, 6.0),
    acts: Sequence[str] = ACTS,
) -> Ledger:
    """Clients at work, and something killed again and again; then everybody finishes what they have begun."""
    served = [ServedMill(mill) for _ in range(gateways)]
    mill.up(workers=workers)
    for gateway in served:
        gateway.serve()
    model, ledger, key = mill.artifact.name, Ledger(), served[0].key()
    mill.wait(lambda: mill.scalar("SELECT COUNT(*) FROM workers WHERE status = 'ready'"), "a worker")
    failures: list[BaseException] = []

    def guarded(work: Callable[..., None], argument: int) -> None:
        try:
            with contextlib.ExitStack() as stack:
                clients = [
                    openai.OpenAI(base_url=each.url, api_key=key, max_retries=0, timeout=CALL_TIMEOUT_S)
                    for each in served
                ]
                for client in clients:
                    stack.enter_context(client)
                work(Caller(ledger, clients), ledger, model, argument)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(chat, number)) for number in range(CHAT_CLIENTS)]
    threads += [threading.Thread(target=guarded, args=(bulk, lines_of_one)) for _ in range(BULK_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        harm(mill, served, ledger, seconds=seconds, pause_s=pause_s, acts=acts, goes_on=lambda: not failures)
    finally:
        ledger.stopping.set()
        for thread in threads:
            thread.join()
    if failures:
        raise AssertionError(f"a client failed\n{mill.standing()}") from failures[0]
    mill.wait_until_done()
    return ledger


def harm(
    mill: Mill,
    served: Sequence[ServedMill],
    ledger: Ledger,
    *,
    seconds: float,
    pause_s: tuple[float, float],
    acts: Sequence[str],
    goes_on: Callable[[], bool],
) -> None:
    """Kill one thing after the other until the time is over; each at least once."""
    until = time.monotonic() + seconds

    def has_more_than(before: int) -> bool:
        return ledger.answered.total() > before or not goes_on()

    for turn in itertools.count():
        if not goes_on() or (turn >= len(acts) and time.monotonic() > until):
            return
        mill.wait(partial(has_more_than, ledger.answered.total()), "an answer between two faults")
        time.sleep(mill.random.uniform(*pause_s))
        match acts[turn % len(acts)]:
            case "gateway":
                kill_gateway(mill, mill.random.choice(served))
            case "worker":
                kill_workers(mill, 1)
            case "all workers":
                kill_workers(mill, len(mill.busy_workers()))  # for a while nobody answers
            case "queue":
                kill_queue(mill)


def kill_gateway(mill: Mill, gateway: ServedMill) -> None:
    mill.inject(gateway.kill)
    time.sleep(mill.random.uniform(0.0, 1.0))
    gateway.serve()


def kill_workers(mill: Mill, count: int) -> None:
    """So many of those that are busy."""
    for pid in mill.random.sample(busy := mill.busy_workers(), min(count, len(busy))):
        with contextlib.suppress(ProcessLookupError):
            mill.inject(partial(os.kill, pid, signal.SIGKILL))


def kill_queue(mill: Mill) -> None:
    if mill.queue is None:
        mill.inject(lambda: os.kill(mill.queue_server_pid(), signal.SIGKILL))  # its supervisor starts it again
    else:
        mill.inject(mill.queue.kill)
        time.sleep(mill.random.uniform(0.0, 1.0))
        mill.queue.start()
    mill.wait(lambda: answers(mill), "the queue server's return")


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
@pytest.mark.parametrize(("database", "queue", "minutes"), [("sqlite", "embedded", 10), ("postgres", "log", 5)])
def test_bulk_and_chat_while_gateway_workers_and_queue_are_killed(
    make_mill: MakeMill, record: Record, database: str, queue: str, minutes: float
) -> None:
    mill = make_mill(database, queue, faults=[SOON], seed=50)
    ledger = run_load(mill, seconds=minutes * 60 * SCALE, gateways=2, workers=2, lines_of_one=300)
    for kind, count in sorted(ledger.answered.items()):
        print(f"{kind}: {count}")
    print(f"seen by clients, and repeated: {dict(ledger.refusals)}")
    record(mill, "bulk and chat by HTTP; gateway, workers, queue killed", tally=tally_of(mill, ledger))
    assert min(ledger.answered[kind] for kind in ("whole", "streamed", "lines")) > 0


@pytest.mark.timeout(600)
def test_bulk_and_chat_survive_a_killed_gateway(make_mill: MakeMill, record: Record) -> None:
    """One fault of each kind; `make drill` goes on for minutes."""
    mill = make_mill("sqlite", "embedded", faults=[SOON], settings={"ENGINE_NULL_TOKEN_S": "0.005"}, seed=51)
    acts = ("gateway", "all workers", "queue")
    ledger = run_load(mill, seconds=0.0, gateways=1, workers=1, lines_of_one=100, pause_s=(0.0, 0.5), acts=acts)
    record(mill, "bulk and chat by HTTP (short)", tally=tally_of(mill, ledger))
    assert min(ledger.answered[kind] for kind in ("whole", "streamed", "lines")) > 0
