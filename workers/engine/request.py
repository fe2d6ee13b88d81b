"""What the engine is asked and what it answers: token ids and numbers, never text.

Instants here are `time.monotonic()` seconds of the engine's process; they become durations before they leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from storage.errors import PromptmillError


class FinishReason(StrEnum):
    """Spelled as in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


# Below this a draw is the likeliest token by all that float32 can tell, and far below it the inverse is infinite.
LEAST_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How the next token is chosen.

    max_tokens: new tokens at most, >= 1. temperature: 0, or less than LEAST_TEMPERATURE, is greedy. top_k: 0 keeps all.
    seed: 64 bits; the same seed on the same logits picks the same tokens, whatever else is in the forward batch.
    logit_bias: added to the logits of the ids named. logprobs: None if not asked for, else how many alternatives to
    report beside the chosen token.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False

    @property
    def is_greedy(self) -> bool:
        return self.temperature < LEAST_TEMPERATURE or self.top_k == 1


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to continue.

    deadline: monotonic seconds after which the request fails with `deadline_exceeded`. on_token: called in the engine's
    thread with each new token id (never a stop token); returning True ends the request with FinishReason.STOP. It must
    be quick and must not raise. is_interactive: somebody waits for it, so it goes before those for whom nobody does.
    """

    prompt_token_ids: Sequence[int]
    sampling: SamplingParameters
    deadline: float | None = None
    on_token: Callable[[int], bool] | None = None
    is_interactive: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one step, before temperature and truncation, after bias and penalties."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionTimes:
    """Seconds. wait: submitted to admitted. prefill: admitted to first token. decode: first token to last."""

    wait_s: float
    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class Completion:
    """An answered request. The stop token that ended it, if any, is not among the ids.

    cached_tokens: of the prompt's tokens, those whose KV rows were copied rather than computed. mean_batch_size: rows
    that shared this request's decode steps, on average, itself included.
    """

    completion_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    prompt_tokens: int
    cached_tokens: int
    mean_batch_size: float
    times: CompletionTimes = field(default_factory=lambda: CompletionTimes(0.0, 0.0, 0.0))


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """A snapshot for probes and metrics. last_step_at: monotonic seconds of the last finished turn with work in it."""

    running: int
    waiting: int
    steps: int
    last_step_at: float
    is_alive: bool


class AnyEngine(Protocol):
    """What a worker asks of an engine, whatever runs the model behind it: see `Engine`."""

    context_length: int
    max_batch_size: int

    def submit(self, request: GenerationRequest) -> Future[Completion]: ...

    def status(self) -> EngineStatus: ...

    def close(self, *, drain: bool = False) -> None: ...


# The code of a failure after which the device answers nobody any more.
DEVICE_FAILED = "device_failed"


class EngineError(PromptmillError):
    """The engine could not answer one request; other requests are not touched."""


def prompt_too_long(prompt_tokens: int, context_length: int) -> EngineError:
    return EngineError(
        f"the prompt has {prompt_tokens} tokens and the context holds {context_length}, one of them for the answer; "
        f"shorten the prompt, or raise PROMPTMILL_ENGINE_CONTEXT_LENGTH up to what the artifact was converted for",
        code="context_length_exceeded",
    )


def deadline_exceeded() -> EngineError:
    return EngineError(
        "the request's deadline passed before it was answered; allow more time", code="deadline_exceeded"
    )


def engine_closed() -> EngineError:
    return EngineError("the engine is closing and hands the request back", code="engine_closed", retryable=True)


def engine_failed(cause: BaseException) -> EngineError:
    return EngineError(
        f"the model run failed ({type(cause).__name__}: {cause}); the request can be tried again",
        code="engine_failed",
        retryable=True,
    )
