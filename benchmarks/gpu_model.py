"""What the GPU engine's scheduler does with a load, on a model of the step times: no GPU, no answers.

    python -m benchmarks.gpu_model                              W1, W3 and W4, with and without chats beside them

The engine is the real one (`PagedEngine`); a step takes no time here, and on the clock of the model what it was
measured to take on an H200 with the shape of Llama-2-7B. Bulk work is that of `benchmarks.gpu`, four, three and two
times as much. Chats arrive at even distances, 200 tokens and 100 new each. So policies can be compared; the speed of a
real GPU is for `benchmarks.gpu` to say.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import random
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import structlog

from benchmarks.gpu import LLAMA2_7B
from benchmarks.workloads import Workload, make_workload
from workers.engine.blocks import block_size_for, blocks_for
from workers.engine.cuda import cuda_row_buckets, cuda_table_widths
from workers.engine.paged_engine import BlockCopy, PagedDecode, PagedEngine, PagedPrefill, StepResult
from workers.engine.request import Completion, GenerationRequest, SamplingParameters
from workers.engine.scheduler import interactive_slots

ROWS, CONTEXT = 512, 4096
BLOCKS = 1960  # beside the weights on an H200
# Seconds: of any prefill and of a token in it; of any decode step, of a row in it and of a token that a row attends to.
PREFILL_S, PREFILL_TOKEN_S = 3e-3, 1 / 58_000
DECODE_S, DECODE_ROW_S, CONTEXT_TOKEN_S = 4.6e-3, 22e-6, 5e5 / 4.3e12
# As much bulk work as keeps the engine busy for some ten seconds.
TIMES = {"W1": 4, "W3": 3, "W4": 2}
CHAT_PROMPT, CHAT_NEW = 200, 100


@dataclass(frozen=True)
class _Ticket:
    seconds: float
    first_source: int
    count: int


class ModelledRunner:
    """A clock that each step advances when it is read. at: instants, and what is called then in the engine's thread."""

    vocab_size = LLAMA2_7B.vocab_size
    context_length = CONTEXT
    prefix_min_blocks = 0
    prefix_min_rows = 32
    copies_blocks = True

    def __init__(self, reserved_rows: int) -> None:
        self.block_size = block_size_for(LLAMA2_7B)
        self.max_rows = ROWS + reserved_rows
        self.row_buckets: Sequence[int] = cuda_row_buckets(ROWS, reserved_rows)
        self.table_widths: Sequence[int] = cuda_table_widths(blocks_for(CONTEXT, self.block_size))
        self.now = 0.0
        self.steps = 0
        self.padded_rows = 0
        self.at: deque[tuple[float, Callable[[], None]]] = deque()

    def start(self, report: Callable[[str, int, int], None]) -> int:
        return BLOCKS

    def prefill(self, call: PagedPrefill) -> _Ticket:
        self.steps += 1
        return _Ticket(PREFILL_S + len(call.token_ids) * PREFILL_TOKEN_S, 2 * self.max_rows, len(call.finishing))

    def decode(self, call: PagedDecode) -> _Ticket:
        self.steps += 1
        self.padded_rows += call.rows - len(call.sources)
        attended = int(call.past_lengths.sum())
        return _Ticket(DECODE_S + call.rows * DECODE_ROW_S + attended * CONTEXT_TOKEN_S, 0, len(call.sources))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def first_source(self, ticket: _Ticket) -> int:
        return ticket.first_source

    def decode_source(self, *, is_prefix: bool) -> int:
        return 0

    def result(self, ticket: _Ticket) -> StepResult:
        self.now += ticket.seconds
        while self.at and self.at[0][0] <= self.now:
            self.at.popleft()[1]()
        return StepResult(np.zeros(ticket.count, dtype=np.int64))

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Outcome:
    """Of one run. Milliseconds, median and most: until a chat's first token, and between two of its tokens."""

    bulk_requests_per_s: float
    steps: int
    padded_rows: int
    preemptions: int
    chats: int
    first_token_ms: tuple[int, int] | None
    pause_ms: tuple[int, int] | None


def run(work: Workload, *, reserved_rows: int, burst_tokens: int, chats_per_s: float) -> Outcome:
    """Bulk work that is all there at once, and chats for as long as it lasts."""
    runner = ModelledRunner(reserved_rows)
    engine = PagedEngine(
        runner, stop_token_ids=[], interactive_rows=reserved_rows, interactive_burst_tokens=burst_tokens
    )
    rng = random.Random(3)
    bulk: list[Future[Completion]] = []
    ends: list[float] = []
    heard: list[tuple[float, list[float]]] = []  # when each chat came, and its tokens

    def note_end(_future: Future[Completion]) -> None:
        ends.append(runner.now)

    def begin(_token_id: int) -> bool:
        """In the engine's thread, so that every run of the model begins alike."""
        if not bulk:
            for prompt, new in zip(work.prompts, work.new_tokens, strict=True):
                bulk.append(engine.submit(GenerationRequest(prompt, SamplingParameters(new, ignore_eos=True))))
                bulk[-1].add_done_callback(note_end)
            if chats_per_s:
                chat()
        return False

    def chat() -> None:
        if len(ends) == len(work.prompts):
            return
        tokens: list[float] = []
        heard.append((runner.now, tokens))

        def on_token(_token_id: int) -> bool:
            tokens.append(runner.now)
            return False

        prompt = [rng.randrange(5, runner.vocab_size) for _ in range(CHAT_PROMPT)]
        sampling = SamplingParameters(CHAT_NEW, ignore_eos=True)
        engine.submit(GenerationRequest(prompt, sampling, on_token=on_token, is_interactive=True))
        runner.at.append((runner.now + 1 / chats_per_s, chat))

    engine.submit(GenerationRequest([1, 2, 3], SamplingParameters(2, ignore_eos=True), on_token=begin)).result()
    for future in bulk:
        future.result()
    engine.close(drain=True)
    firsts = [tokens[0] - came for came, tokens in heard if tokens]
    pauses = [after - before for _, tokens in heard for before, after in itertools.pairwise(tokens)]
    return Outcome(
        bulk_requests_per_s=round(len(ends) / max(ends), 2),
        steps=runner.steps,
        padded_rows=runner.padded_rows,
        preemptions=engine._preemptions,
        chats=len(heard),
        first_token_ms=_median_and_most(firsts),
        pause_ms=_median_and_most(pauses),
    )


def _median_and_most(seconds: Sequence[float]) -> tuple[int, int] | None:
    return (round(1000 * float(np.median(seconds))), round(1000 * max(seconds))) if seconds else None


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workloads", nargs="+", choices=TIMES, default=list(TIMES))
    parser.add_argument("--chats-per-s", type=float, default=2.0)
    parser.add_argument("--burst-tokens", type=int, default=2048, help="prompt tokens at once while a chat is in hand")
    given = parser.parse_args(arguments)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    reserve = interactive_slots(ROWS)
    ways: dict[str, dict[str, Any]] = {
        "alone, no reserve": {"reserved_rows": 0, "burst_tokens": given.burst_tokens, "chats_per_s": 0.0},
        "alone": {"reserved_rows": reserve, "burst_tokens": given.burst_tokens, "chats_per_s": 0.0},
        "chats, no reserve, long bursts": {"reserved_rows": 0, "burst_tokens": 1 << 30},
        "chats": {"reserved_rows": reserve, "burst_tokens": given.burst_tokens},
    }
    results: dict[str, dict[str, Any]] = {}
    for name in given.workloads:
        parts = [make_workload(name, LLAMA2_7B, seed) for seed in range(TIMES[name])]
        work = Workload(
            parts[0].description,
            [prompt for part in parts for prompt in part.prompts],
            [new for part in parts for new in part.new_tokens],
        )
        for way, options in ways.items():
            outcome = run(work, **{"chats_per_s": given.chats_per_s, **options})
            results[f"{name}, {way}"] = asdict(outcome)
            print(f"{name}, {way}: {json.dumps(asdict(outcome))}", flush=True)
    print(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1:])
