"""A claimed request → what the engine is asked; what the engine answered → the response body and the attempt's record.

Text lives here, token ids live in the engine. Everything that can be wrong with one request is found here and fails
that request alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

from jobs import protocol
from jobs.protocol import Body, ChatBody, Choice, CompletionBody, Endpoint, TokenLogprob, Usage
from storage.errors import InvalidRequest, PromptmillError
from storage.models import RequestStatus, ServedFrom
from storage.queries import StoredAnswer
from storage.transitions import AttemptRecord, ClaimedRequest, RequestOutcome
from workers.engine.request import Completion, GenerationRequest, SamplingParameters, TokenLogprobs
from workers.tokenizer import StopStrings, Tokenizer

_PARAMETERS = tuple(field.name for field in fields(SamplingParameters))


@dataclass(frozen=True, slots=True)
class Served:
    """What this worker runs: the model's name as lines write it, what made the answer, and its bounds.

    longest_context: what the artifact allows, of which the worker may run less.
    """

    model: str
    artifact_digest: str
    device: str
    context_length: int
    longest_context: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request ready for the engine: one generation for each of its `n` choices."""

    claimed: ClaimedRequest
    endpoint: Endpoint
    generations: tuple[GenerationRequest, ...]
    stops: tuple[StopStrings | None, ...]
    claimed_at: float  # monotonic seconds
    tokenize_s: float
    parameters: str  # JSON, for the attempt's record
    # Parameters as asked, JSON, of a request that is greedy or names its seed: asked again, it answers the same.
    question: str | None = None
    is_streamed: bool = False  # its caller wants the text as it comes
    stop_texts: tuple[str, ...] = ()


def prepare(
    claimed: Sequence[ClaimedRequest],
    prefixes: Mapping[int, str],
    tokenizer: Tokenizer,
    served: Served,
    claimed_at: float,
) -> Iterator[tuple[ClaimedRequest, PreparedRequest | Exception]]:
    """Read requests' bodies, tokenize their prompts together, check each against the model's bounds.

    prefixes: prefix id -> the shared text that prompts begin with. claimed_at: monotonic seconds, where latency begins.
    Each comes with InvalidRequest where something is wrong with it, or with whatever else went wrong.
    """
    started = time.monotonic()
    prompts: list[_Prompt | None] = []
    wrong: dict[int, Exception] = {}  # place -> what is wrong with it
    for place, request in enumerate(claimed):
        try:
            prefix = prefixes[request.prefix_id] if request.prefix_id is not None else ""
            prompts.append(_read(request, prefix, tokenizer, served))
        except Exception as error:
            prompts.append(None)
            wrong[place] = error
    wrong |= _tokenize(prompts, tokenizer)
    tokenize_s = (time.monotonic() - started) / max(1, len(claimed))
    for place, (request, prompt) in enumerate(zip(claimed, prompts, strict=True)):
        if prompt is None or place in wrong:
            yield request, wrong[place]
            continue
        try:
            yield request, _ask(request, prompt, served, tokenizer, claimed_at, tokenize_s)
        except Exception as error:
            yield request, error


@dataclass(slots=True)
class _Prompt:
    """A body and its prompt: as text still to be tokenized, or as ids."""

    body: Body
    text: str | None
    wants_bos: bool = False
    token_ids: Sequence[int] = ()


def _tokenize(prompts: Sequence[_Prompt | None], tokenizer: Tokenizer) -> dict[int, Exception]:
    """Give prompts that are text their ids. Returns place -> error, where one could not be tokenized."""
    texts = [(place, prompt) for place, prompt in enumerate(prompts) if prompt is not None and prompt.text is not None]
    try:
        encoded = tokenizer.encode_many([prompt.text or "" for _, prompt in texts], add_bos=False)
    except Exception as error:
        if len(texts) == 1:
            return {texts[0][0]: error}
        # One of them does it: its neighbours shall not suffer.
        wrong: dict[int, Exception] = {}
        for place, prompt in texts:
            for found in _tokenize([prompt], tokenizer).values():
                wrong[place] = found
        return wrong
    for (_, prompt), token_ids in zip(texts, encoded, strict=True):
        prompt.token_ids = tokenizer.with_bos(token_ids) if prompt.wants_bos else token_ids
    return {}


def _read(claimed: ClaimedRequest, prefix: str, tokenizer: Tokenizer, served: Served) -> _Prompt:
    body = protocol.load_body(Endpoint(claimed.endpoint), claimed.body, prefix)
    if body.model is not None and body.model != served.model:
        raise protocol.model_not_found(body.model, served.model)
    if isinstance(body, ChatBody):
        # BOS is the template's business: it writes one where the model wants one.
        return _Prompt(body, tokenizer.render_chat([_message(message) for message in body.messages]))
    assert isinstance(body, CompletionBody)
    if isinstance(body.prompt, str):
        return _Prompt(body, body.prompt, wants_bos=True)
    return _Prompt(body, None, token_ids=body.prompt)


def _ask(
    claimed: ClaimedRequest,
    prompt: _Prompt,
    served: Served,
    tokenizer: Tokenizer,
    claimed_at: float,
    tokenize_s: float,
) -> PreparedRequest:
    """What the engine is asked for one request. Raises InvalidRequest."""
    body, tokens = prompt.body, len(prompt.token_ids)
    wanted = body.sampling()
    param = "messages" if isinstance(body, ChatBody) else "prompt"
    if not tokens:
        raise protocol.empty_prompt(param)
    if max(prompt.token_ids) >= served.vocab_size:
        beyond = next(token_id for token_id in prompt.token_ids if token_id >= served.vocab_size)
        if prompt.text is None:
            raise protocol.token_out_of_vocabulary(beyond, served.vocab_size, param)
        # Checkpoints are to be had whose tokenizer was given tokens, and whose embedding was given none.
        text = tokenizer.token_bytes(beyond).decode("utf-8", "replace")
        raise protocol.text_out_of_vocabulary(text, beyond, served.vocab_size, param)
    if tokens >= served.context_length:
        raise protocol.context_length_exceeded(tokens, served.context_length, longest=served.longest_context)
    room = served.context_length - tokens
    if wanted.max_tokens is not None and wanted.max_tokens > room:
        raise protocol.max_tokens_exceeds_context(
            wanted.max_tokens, tokens, served.context_length, longest=served.longest_context
        )
    for token_id in wanted.logit_bias:
        if token_id >= served.vocab_size:
            raise protocol.token_out_of_vocabulary(token_id, served.vocab_size, "logit_bias")
    seed = wanted.seed if wanted.seed is not None else _derive_seed("request", claimed.id)
    parameters = SamplingParameters(
        max_tokens=wanted.max_tokens or room,
        temperature=wanted.temperature,
        top_p=wanted.top_p,
        top_k=wanted.top_k,
        seed=seed,
        frequency_penalty=wanted.frequency_penalty,
        presence_penalty=wanted.presence_penalty,
        logit_bias=tuple(wanted.logit_bias.items()),
        logprobs=wanted.logprobs,
        ignore_eos=wanted.ignore_eos,
    )
    stops = tuple(StopStrings(tokenizer, wanted.stop) if wanted.stop else None for _ in range(wanted.n))
    generations = tuple(
        GenerationRequest(
            prompt_token_ids=prompt.token_ids,
            sampling=parameters if choice == 0 else _reseed(parameters, choice),
            on_token=stop.push if stop else None,
        )
        for choice, stop in enumerate(stops)
    )
    record: dict[str, object] = {name: getattr(parameters, name) for name in _PARAMETERS}
    record |= {"logit_bias": wanted.logit_bias, "stop": wanted.stop, "n": wanted.n}
    is_deterministic = wanted.temperature == 0 or wanted.seed is not None
    return PreparedRequest(
        claimed=claimed,
        endpoint=Endpoint(claimed.endpoint),
        generations=generations,
        stops=stops,
        claimed_at=claimed_at,
        tokenize_s=tokenize_s,
        parameters=protocol.dump_json(record),
        question=protocol.dump_json({**record, "seed": wanted.seed}) if is_deterministic else None,
        is_streamed=bool(body.stream),
        stop_texts=wanted.stop,
    )


def _message(message: protocol.Message) -> dict[str, object]:
    """A message as templates see it: what it does not say is not there."""
    return message.model_dump(exclude_none=True)


def answer(
    prepared: PreparedRequest,
    completions: Sequence[Completion],
    tokenizer: Tokenizer,
    served: Served,
    *,
    submitted_at: float,
    now: float,
) -> RequestOutcome:
    """Turn the completions of a request's choices into its result.

    submitted_at: monotonic seconds when the engine was given the request. now: database time, for `created`.
    """
    choices = [
        Choice(
            text=_text(completion, stop, prepared.endpoint, tokenizer),
            finish_reason=completion.finish_reason.value,
            logprobs=_logprobs(completion.logprobs, tokenizer),
        )
        for completion, stop in zip(completions, prepared.stops, strict=True)
    ]
    first = completions[0]
    usage = Usage(
        prompt_tokens=first.prompt_tokens,
        completion_tokens=sum(len(completion.completion_token_ids) for completion in completions),
        cached_tokens=first.cached_tokens,
    )
    response = protocol.render_response(
        prepared.endpoint,
        id=f"{prepared.claimed.id:x}",
        created=int(now),
        model=served.model,
        choices=choices,
        usage=usage,
        system_fingerprint=f"fp_{served.artifact_digest[:12]}",
    )
    offset_s = submitted_at - prepared.claimed_at
    slowest = max(completions, key=_total_s)
    first_token_s = min(completion.times.wait_s + completion.times.prefill_s for completion in completions)
    claimed = prepared.claimed
    record = AttemptRecord(
        device=served.device,
        artifact_digest=served.artifact_digest,
        parameters=prepared.parameters,
        finish_reason=first.finish_reason.value,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        completion_tokens=usage.completion_tokens,
        mean_batch_size=sum(completion.mean_batch_size for completion in completions) / len(completions),
        queue_s=_queue_s(claimed),
        tokenize_s=prepared.tokenize_s,
        wait_s=first.times.wait_s,
        prefill_s=first.times.prefill_s,
        time_to_first_token_s=offset_s + first_token_s,
        decode_s=slowest.times.decode_s,
        total_s=offset_s + _total_s(slowest),
    )
    return RequestOutcome(
        request_id=claimed.id,
        batch_id=claimed.batch_id,
        attempt_number=claimed.attempt,
        status=RequestStatus.COMPLETED,
        status_code=200,
        response=protocol.dump_json(response),
        record=record,
    )


def serve_again(prepared: PreparedRequest, known: StoredAnswer, served: Served) -> RequestOutcome:
    """Give a request the answer that an identical one has. Nothing is computed, and the attempt's record says so."""
    claimed = prepared.claimed
    return RequestOutcome(
        request_id=claimed.id,
        batch_id=claimed.batch_id,
        attempt_number=claimed.attempt,
        status=RequestStatus.COMPLETED,
        status_code=200,
        response=protocol.with_response_id(known.response, f"{claimed.id:x}"),
        record=AttemptRecord(
            device=served.device,
            artifact_digest=served.artifact_digest,
            parameters=prepared.parameters,
            finish_reason=known.finish_reason,
            prompt_tokens=known.prompt_tokens,
            completion_tokens=known.completion_tokens,
            queue_s=_queue_s(claimed),
            tokenize_s=prepared.tokenize_s,
            total_s=time.monotonic() - prepared.claimed_at,
            served_from=ServedFrom.CACHE,
            source_request_id=known.request_id,
        ),
    )


def refusal(claimed: ClaimedRequest, error: PromptmillError, served: Served) -> RequestOutcome:
    """Turn an error that is this request's own into its result."""
    return RequestOutcome(
        request_id=claimed.id,
        batch_id=claimed.batch_id,
        attempt_number=claimed.attempt,
        status=RequestStatus.FAILED,
        status_code=400 if isinstance(error, InvalidRequest) else 500,
        response=protocol.dump_json(protocol.render_error_body(error)),
        error_code=error.code,
        error_message=error.message,
        record=AttemptRecord(device=served.device, artifact_digest=served.artifact_digest, queue_s=_queue_s(claimed)),
    )


def _total_s(completion: Completion) -> float:
    return completion.times.wait_s + completion.times.prefill_s + completion.times.decode_s


def _text(completion: Completion, stop: StopStrings | None, endpoint: Endpoint, tokenizer: Tokenizer) -> str:
    text = tokenizer.decode_answer(completion.completion_token_ids) if stop is None else stop.text
    # A completion goes on from its prompt, its first space included; a chat answer begins a text of its own.
    is_chat = endpoint is Endpoint.CHAT and tokenizer.adds_space_prefix
    return text.removeprefix(" ") if is_chat else text


def _logprobs(steps: Sequence[TokenLogprobs] | None, tokenizer: Tokenizer) -> tuple[TokenLogprob, ...] | None:
    if steps is None:
        return None
    return tuple(
        TokenLogprob(
            *_shown(step.token_id, step.logprob, tokenizer),
            alternatives=tuple(TokenLogprob(*_shown(token, value, tokenizer)) for token, value in step.top),
        )
        for step in steps
    )


def _shown(token_id: int, logprob: float, tokenizer: Tokenizer) -> tuple[str, float, bytes]:
    utf8 = tokenizer.token_bytes(token_id)
    return utf8.decode("utf-8", errors="replace"), logprob, utf8


def _queue_s(claimed: ClaimedRequest) -> float | None:
    return None if claimed.queued_at is None else max(0.0, claimed.claimed_at - claimed.queued_at)


def _reseed(parameters: SamplingParameters, choice: int) -> SamplingParameters:
    values = asdict(parameters) | {"seed": _derive_seed(parameters.seed, choice)}
    return SamplingParameters(**values)


def _derive_seed(*parts: object) -> int:
    """A seed that a second attempt derives again, so that a retry after a crash gives the same answer."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
