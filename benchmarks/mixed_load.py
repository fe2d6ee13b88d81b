"""A mixed load on an engine, as long as one likes: what comes at random, what was answered wrongly, what grew.

Requests arrive by Poisson, now faster and now slower than the engine can answer. Prompts and answers are of every
length, many prompts begin alike and part within a block; greedy and seeded draws, penalties, log probabilities; some
are given up, some have a deadline, some are interactive, and their listener may stop them. Every answer is checked for
its form; of a sample the content is compared with what an engine says that has nothing else to do (`compare_alone`).
"""

from __future__ import annotations

import heapq
import random
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from benchmarks.workloads import log_uniform
from storage.errors import PromptmillError
from workers.engine.request import (
    AnyEngine,
    Completion,
    FinishReason,
    GenerationRequest,
    SamplingParameters,
    TokenLogprobs,
)

# As many alternatives as the engines report. A draw from half as many can be judged afterwards: arithmetic may exchange
# its last candidates for the next ones.
MOST_CANDIDATES = 20
_PHASE_S = 4.0
# How often the rate is raised while it should fill the engine and does not, and by how much.
_RAISE_S, _RAISE = 0.1, 1.3
# What the load is, where the engine is fast: 1 is all it can do.
_PACES = (1.5, 0.5)
_MEMORY_READINGS = 200
_MEMORY_TOLD = 20


@dataclass(frozen=True)
class Mix:
    """text: token ids, of which every prompt is made of pieces. Lengths are log-uniform up to the longest."""

    text: Sequence[int]
    longest_prompt: int
    longest_answer: int
    cancelled_share: float = 0.08
    deadline_share: float = 0.03
    interactive_share: float = 0.1
    shared_share: float = 0.5


@dataclass(frozen=True)
class Answered:
    """A request that came to its end, and its answer."""

    request: GenerationRequest
    completion: Completion


@dataclass
class LoadReport:
    """What happened. readings: seconds since the start, resident bytes of this process, used bytes of the device.

    wrong: what was not as it must be, in words. first_token_s: of bulk and of interactive requests, since submission.
    """

    submitted: int = 0
    answered: int = 0
    cancelled: int = 0
    expired: int = 0
    interactive: int = 0
    new_tokens: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    sample: list[Answered] = field(default_factory=list)
    readings: list[tuple[float, int, int | None]] = field(default_factory=list)
    first_token_s: dict[bool, array[float]] = field(default_factory=lambda: {False: array("d"), True: array("d")})

    @property
    def resident_growth(self) -> int:
        return growth([resident for _, resident, _ in self.readings])

    @property
    def device_growth(self) -> int | None:
        used = [device for _, _, device in self.readings if device is not None]
        return growth(used) if used else None

    def figures(self) -> dict[str, Any]:
        """For a table and a JSON line. mib_by_time: seconds, this process's memory, the device's (of all processes)."""
        megabytes = 1 << 20
        device = self.device_growth
        return {
            "seconds": round(self.seconds, 1),
            "submitted": self.submitted,
            "answered": self.answered,
            "cancelled": self.cancelled,
            "expired": self.expired,
            "interactive": self.interactive,
            "new_tokens": self.new_tokens,
            "requests_per_s": round(self.answered / self.seconds, 2),
            "resident_mib": round(self.readings[-1][1] / megabytes),
            "resident_growth_mib": round(self.resident_growth / megabytes, 1),
            "device_growth_mib": None if device is None else round(device / megabytes, 1),
            "mib_by_time": [
                (round(at), resident >> 20, None if used is None else used >> 20)
                for at, resident, used in self.readings[:: max(1, len(self.readings) // _MEMORY_TOLD)]
            ],
            "first_token_s": {
                name: [round(float(value), 4) for value in np.quantile(self.first_token_s[is_interactive], [0.5, 0.99])]
                for name, is_interactive in (("bulk", False), ("interactive", True))
                if self.first_token_s[is_interactive]
            },
            "wrong": len(self.wrong),
        }


def growth(readings: Sequence[int]) -> int:
    """From the second quarter of a run, when all is warm, to the last: the difference of the medians."""
    quarter = max(1, len(readings) // 4)
    return round(
        statistics.median(readings[-quarter:]) - statistics.median(readings[quarter : 2 * quarter] or readings)
    )


# --- what is asked -----------------------------------------------------------------------------------------------


def make_request(mix: Mix, rng: random.Random) -> GenerationRequest:
    """One request of the mix, without a listener or a deadline."""
    length = log_uniform(rng, 1, mix.longest_prompt)
    start = rng.randrange(max(1, len(mix.text) - length))
    if rng.random() < mix.shared_share and length > 8:
        # One of a few beginnings, cut anywhere, and then something of its own.
        beginning = 101 * rng.randrange(6) % max(1, len(mix.text) - length)
        shared = rng.randrange(length // 2, length)
        prompt = [*mix.text[beginning : beginning + shared], *mix.text[start : start + length - shared]]
    else:
        prompt = list(mix.text[start : start + length])
    return GenerationRequest(prompt, make_sampling(mix, rng), is_interactive=rng.random() < mix.interactive_share)


def make_sampling(mix: Mix, rng: random.Random) -> SamplingParameters:
    values: dict[str, Any] = {"max_tokens": log_uniform(rng, 1, mix.longest_answer), "seed": rng.getrandbits(64)}
    if rng.random() < 0.5:
        values |= {
            "temperature": rng.choice((0.7, 1.0)),
            "top_k": rng.choice((0, 5, MOST_CANDIDATES // 2)),
            "top_p": rng.choice((1.0, 0.9)),
        }
    if rng.random() < 0.15:
        values |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
    if rng.random() < 0.15:
        values["logprobs"] = rng.choice((0, 3))
    return SamplingParameters(**values, ignore_eos=rng.random() < 0.5)


# --- the load ----------------------------------------------------------------------------------------------------


def run_mixed_load(
    engine: AnyEngine,
    mix: Mix,
    *,
    seconds: float,
    seed: int,
    sample_size: int = 100,
    device_bytes: Callable[[], int | None] = lambda: None,
) -> LoadReport:
    """Load an engine for so long, and wait for the last answer. device_bytes: memory in use on the engine's device."""
    return _MixedLoad(engine, mix, seed, sample_size, device_bytes).run(seconds)


class _MixedLoad:
    """One run: the caller's thread submits and gives up, the engine's thread hears of the ends."""

    def __init__(
        self, engine: AnyEngine, mix: Mix, seed: int, sample_size: int, device_bytes: Callable[[], int | None]
    ) -> None:
        self._engine = engine
        self._mix = mix
        self._rng = random.Random(seed)
        self._sampling_rng = random.Random(seed + 1)  # of the engine's thread
        self._sample_size = sample_size
        self._device_bytes = device_bytes
        self._process = psutil.Process()
        self._report = LoadReport()
        self._changed = threading.Condition()  # guards the report and what follows
        self._outstanding = 0
        self._eligible = 0
        self._latency_s = 0.05  # of answers, a running mean
        self._to_cancel: list[tuple[float, int, Future[Completion]]] = []

    def run(self, seconds: float) -> LoadReport:
        start = time.monotonic()
        next_at, next_reading_at, rate = start, start, float(self._engine.max_batch_size)
        phase_at, raise_at, answered, phase = start, start, 0, 0
        while (now := time.monotonic()) < start + seconds:
            if now >= next_reading_at:
                self._read_memory(now - start)
                next_reading_at = now + seconds / _MEMORY_READINGS
            if now >= phase_at + _PHASE_S:
                if _PACES[phase % len(_PACES)] > 1:  # only a full engine shows what it can do
                    rate = max(1.0, (self._report.answered - answered) / (now - phase_at))
                phase_at, answered, phase = now, self._report.answered, phase + 1
            pace = _PACES[phase % len(_PACES)]
            if pace > 1 and now >= raise_at + _RAISE_S:
                raise_at = now
                if self._outstanding < self._engine.max_batch_size:
                    rate *= _RAISE
            while self._to_cancel and self._to_cancel[0][0] <= now:
                heapq.heappop(self._to_cancel)[2].cancel()
            if now >= next_at and self._outstanding < 3 * self._engine.max_batch_size:
                self._submit(now)
                next_at = max(next_at, now - 0.1) + self._rng.expovariate(rate * pace)
            else:
                time.sleep(0.001)
        with self._changed:
            while self._outstanding:
                assert self._changed.wait(600), f"{self._outstanding} requests are never answered"
        self._report.seconds = time.monotonic() - start
        self._read_memory(self._report.seconds)
        return self._report

    def _read_memory(self, at: float) -> None:
        self._report.readings.append((at, self._process.memory_info().rss, self._device_bytes()))

    def _submit(self, now: float) -> None:
        rng = self._rng
        request = make_request(self._mix, rng)
        heard: list[int] = []
        if request.is_interactive:
            patience = rng.randrange(1, self._mix.longest_answer) if rng.random() < 0.3 else 1 << 30

            def on_token(token_id: int) -> bool:
                heard.append(token_id)
                return len(heard) >= patience

            request = replace(request, on_token=on_token)
        if rng.random() < self._mix.deadline_share:
            request = replace(request, deadline=now + rng.expovariate(1 / self._latency_s))
        is_given_up = rng.random() < self._mix.cancelled_share
        with self._changed:
            self._outstanding += 1
            self._report.submitted += 1
        future = self._engine.submit(request)
        future.add_done_callback(lambda done: self._note(request, heard, done))
        if is_given_up:
            heapq.heappush(
                self._to_cancel, (now + rng.expovariate(1 / self._latency_s), self._report.submitted, future)
            )

    def _note(self, request: GenerationRequest, heard: list[int], future: Future[Completion]) -> None:
        with self._changed:
            self._outstanding -= 1
            report = self._report
            if future.cancelled():
                report.cancelled += 1
            elif (error := future.exception()) is not None:
                if isinstance(error, PromptmillError) and error.code == "deadline_exceeded":
                    report.expired += 1
                else:
                    report.wrong.append(f"failed: {error}")
            else:
                self._note_answer(request, heard, future.result())
            self._changed.notify()

    def _note_answer(self, request: GenerationRequest, heard: list[int], completion: Completion) -> None:
        report = self._report
        report.answered += 1
        report.interactive += request.is_interactive
        report.new_tokens += len(completion.completion_token_ids)
        times = completion.times
        self._latency_s += 0.02 * (times.wait_s + times.prefill_s + times.decode_s - self._latency_s)
        waits = report.first_token_s[request.is_interactive]
        if len(waits) < 100_000:
            waits.append(times.wait_s + times.prefill_s)
        report.wrong += wrong_form(request, heard, completion, self._engine.context_length)
        if request.sampling.temperature and not 0 < request.sampling.top_k <= MOST_CANDIDATES // 2:
            return  # what such a draw was near to cannot be told from the candidates reported
        self._eligible += 1
        if len(report.sample) < self._sample_size:
            report.sample.append(Answered(request, completion))
        elif (place := self._sampling_rng.randrange(self._eligible)) < self._sample_size:
            report.sample[place] = Answered(request, completion)


def wrong_form(
    request: GenerationRequest, heard: Sequence[int], completion: Completion, context_length: int
) -> list[str]:
    """What of an answer can be seen to be wrong without knowing the right one."""
    sampling, answer = request.sampling, completion.completion_token_ids
    most = min(sampling.max_tokens, context_length - len(request.prompt_token_ids) + 1)
    wrong = []
    if completion.prompt_tokens != len(request.prompt_token_ids):
        wrong.append(f"{completion.prompt_tokens} prompt tokens instead of {len(request.prompt_token_ids)}")
    is_whole = len(answer) == most
    is_stopped = request.on_token is not None and is_whole  # perhaps: by its listener, with the last token
    if len(answer) > most or ((completion.finish_reason is FinishReason.LENGTH) != is_whole and not is_stopped):
        wrong.append(f"{completion.finish_reason} after {len(answer)} of {most} tokens")
    if request.on_token is not None and list(heard) != list(answer):
        wrong.append(f"the listener heard {len(heard)} tokens, and not those {len(answer)} of the answer")
    if (completion.logprobs is None) != (sampling.logprobs is None):
        wrong.append("log probabilities are there unasked for, or missing")
    elif completion.logprobs is not None and [entry.token_id for entry in completion.logprobs] != list(answer):
        wrong.append("log probabilities are of other tokens than the answer's")
    return wrong


# --- the comparison ----------------------------------------------------------------------------------------------


@dataclass
class Agreement:
    """How a sample's answers compare with those given alone. largest_gap: of log probabilities, where both are told."""

    answers: int = 0
    identical: int = 0
    near_ties: int = 0
    tokens: int = 0
    largest_gap: float = 0.0
    wrong: list[str] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        return {
            "compared_answers": self.answers,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "compared_tokens": self.tokens,
            "largest_logprob_gap": round(self.largest_gap, 6),
            "wrong": len(self.wrong),
        }


def compare_alone(
    alone: AnyEngine, sample: Sequence[Answered], *, stop_token_ids: Sequence[int], tie: float, timeout_s: float = 600
) -> Agreement:
    """Ask each request of a sample again, one at a time, and compare token by token.

    tie: by how much log probabilities may differ by arithmetic. Where two answers part, the token taken must have been
    as good as the other by that much, or, drawn, as near to the number drawn; what follows is not compared. 0: no
    difference is let pass.
    """
    agreement = Agreement()
    for answered in sample:
        request, answer = answered.request, answered.completion.completion_token_ids
        sampling = replace(
            request.sampling,
            ignore_eos=True,  # where ours ended with a stop token, this tells which token comes there
            max_tokens=min(request.sampling.max_tokens, len(answer) + 1),
            logprobs=MOST_CANDIDATES if tie else request.sampling.logprobs,
        )
        again = alone.submit(GenerationRequest(request.prompt_token_ids, sampling)).result(timeout_s)
        _compare(answered, again, stop_token_ids, tie, agreement)
    return agreement


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens two answers begin with alike."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


def _compare(
    answered: Answered, again: Completion, stop_token_ids: Sequence[int], tie: float, agreement: Agreement
) -> None:
    request, completion = answered.request, answered.completion
    ours, theirs = completion.completion_token_ids, again.completion_token_ids
    parting = first_difference(ours, theirs)
    agreement.answers += 1
    agreement.tokens += parting
    if completion.logprobs is not None and again.logprobs is not None:
        both = list(zip(completion.logprobs, again.logprobs, strict=False))[:parting]
        gap = max((abs(one.logprob - other.logprob) for one, other in both), default=0.0)
        agreement.largest_gap = max(agreement.largest_gap, gap)
        if gap > tie:
            agreement.wrong.append(f"log probabilities differ by {gap}")
    taken: Sequence[int] = ours[parting : parting + 1]
    if not taken:
        # A listener's stop has the same reason as a stop token's, so behind what was listened to nothing is compared.
        is_stopped = completion.finish_reason is FinishReason.STOP and request.on_token is None
        if not is_stopped or theirs[parting] in stop_token_ids:
            agreement.identical += 1
            return
        taken = stop_token_ids
    if tie and again.logprobs is not None and parting < len(again.logprobs):
        entry, sampling = again.logprobs[parting], request.sampling
        if any(is_near_tie(entry, token_id, sampling, parting, tie) for token_id in taken):
            agreement.near_ties += 1
            return
    agreement.wrong.append(
        f"token {parting} is {ours[parting : parting + 1]} and alone {theirs[parting : parting + 1]}, "
        f"after {len(request.prompt_token_ids)} prompt tokens, temperature {request.sampling.temperature}"
    )


def is_near_tie(entry: TokenLogprobs, token_id: int, sampling: SamplingParameters, position: int, tie: float) -> bool:
    """Whether arithmetic alone, by so much, may have taken `token_id` in place of an entry's token.

    entry: with its alternatives, of a draw at least one more than its top k. Either both are as likely, or the number
    drawn for the position was as near to a place that the token may have had.
    """
    likely = dict(entry.top)
    if token_id not in likely:
        return False
    if abs(entry.logprob - likely[token_id]) <= tie:
        return True
    if sampling.is_greedy:
        return False
    uniform = float(np.random.Generator(np.random.Philox(key=sampling.seed)).random(position + 1)[position])
    logprobs = np.array(list(likely.values()))
    # Arithmetic may have given the token the place of any that is as likely: that of the last of the top k, too.
    places = np.flatnonzero(np.abs(logprobs - likely[token_id]) <= tie)
    weights = np.exp((logprobs[: sampling.top_k] - logprobs[0]) / sampling.temperature)
    ends = np.cumsum(weights) / weights.sum()
    slack = tie / sampling.temperature
    # The end of the nucleus may itself be a near one.
    nuclei = [ends.size]
    if sampling.top_p < 1.0:
        nuclei = list(
            np.flatnonzero(
                (ends >= sampling.top_p - slack) & (ends - np.diff(ends, prepend=0.0) < sampling.top_p + slack)
            )
            + 1
        )
    for count in nuclei:
        shares = ends[:count] / ends[count - 1]
        begins = np.concatenate([[0.0], shares[:-1]])
        near = (begins - slack <= uniform) & (uniform <= shares + slack)
        if near[places[places < count]].any():
            return True
    return False
