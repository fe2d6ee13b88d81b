"""What callers are told while they wait: only text that stands, once, and heard."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from jobs.protocol import Endpoint
from jobs.queue import redis_url
from storage.models import RequestStatus
from storage.transitions import ClaimedRequest, RequestOutcome
from tests.conftest import wait_until
from workers.answers import PreparedRequest
from workers.engine.request import GenerationRequest, SamplingParameters
from workers.replies import LONGEST_TOLD, Replies, SettledText
from workers.tokenizer import StopStrings, Tokenizer

CHANNEL = "promptmill.replies.test"


class ByteTokenizer:
    """A token is a byte; 256 is special."""

    adds_space_prefix = True

    def is_special(self, token_id: int) -> bool:
        return token_id == 256

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])


def byte_tokenizer() -> Tokenizer:
    return ByteTokenizer()  # type: ignore[return-value]


@given(
    text=st.text(alphabet="ab é€😀", max_size=30),
    stops=st.lists(st.text(alphabet="ab é", min_size=1, max_size=4), max_size=3),
    drops_space=st.booleans(),
    broken=st.lists(st.tuples(st.integers(0, 30), st.integers(128, 256)), max_size=3),
)
def test_what_is_told_is_never_taken_back(
    text: str, stops: list[str], drops_space: bool, broken: list[tuple[int, int]]
) -> None:
    """Whatever the stops and however characters fall into tokens, bytes that are no text among them."""
    tokens = list(text.encode())
    for at, token in broken:
        tokens.insert(min(at, len(tokens)), token)
    settled = SettledText(byte_tokenizer(), stops, drops_space=drops_space)
    final = StopStrings(byte_tokenizer(), stops)
    told = [""]
    for token in tokens:
        settled.push(token)
        told.append(settled.text)
        if final.push(token):
            break
    whole = final.text.removeprefix(" ") if drops_space else final.text
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(told))
    assert whole.startswith(told[-1])
    if not stops:
        assert told[-1] == whole


def test_the_beginning_of_a_stop_is_held_back_until_it_is_none() -> None:
    settled = SettledText(byte_tokenizer(), ["###", "END"], drops_space=False)
    told = []
    for character in b"a##b EN#E END!":
        settled.push(character)
        told.append(settled.text)
    assert told == ["a", "a", "a", "a##b", "a##b ", "a##b ", "a##b ", "a##b EN", "a##b EN#", *["a##b EN#E "] * 5]


def claimed(attempt: int = 1, reply_to: str | None = CHANNEL, expires_at: float | None = None) -> ClaimedRequest:
    return ClaimedRequest(
        id=7,
        batch_id=1,
        line=1,
        custom_id=None,
        attempt=attempt,
        body="{}",
        prefix_id=None,
        endpoint=Endpoint.CHAT.value,
        model="m",
        queued_at=0.0,
        claimed_at=100.0,
        is_interactive=True,
        expires_at=expires_at,
        reply_to=reply_to,
    )


def prepared(request: ClaimedRequest, choices: int = 1, **options: Any) -> PreparedRequest:
    return PreparedRequest(
        claimed=request,
        endpoint=Endpoint.CHAT,
        generations=tuple(GenerationRequest([1], SamplingParameters(max_tokens=9)) for _ in range(choices)),
        stops=(None,) * choices,
        claimed_at=0.0,
        tokenize_s=0.0,
        parameters="{}",
        **{"is_streamed": True, **options},
    )


def outcome(attempt: int, response: str) -> RequestOutcome:
    return RequestOutcome(
        request_id=7,
        batch_id=1,
        attempt_number=attempt,
        status=RequestStatus.COMPLETED,
        status_code=200,
        response=response,
    )


def push(generation: GenerationRequest, text: str) -> None:
    assert generation.on_token is not None
    for token in text.encode():
        assert generation.on_token(token) is False


class Listener:
    """Puts together what was told on the channel."""

    def __init__(self, client: redis.Redis) -> None:
        self._subscription = client.pubsub(ignore_subscribe_messages=True)
        self._subscription.subscribe(CHANNEL)
        while self._subscription.get_message(timeout=5.0) is not None:
            pass
        self.texts: dict[tuple[int, int], str] = {}
        self.ended: list[int] = []
        self.answers: list[dict[str, Any] | None] = []

    def hear(self) -> bool:
        message = self._subscription.get_message(timeout=0.05)
        for event in json.loads(message["data"]) if message else []:
            for choice, at, text in event["text"]:
                known = self.texts.get((event["attempt"], choice), "")
                assert at == len(known), "a gap, or a repetition"
                self.texts[event["attempt"], choice] = known + text
            if event["ended"]:
                self.ended.append(event["attempt"])
                self.answers.append(event.get("answer"))
        return bool(message)

    def wait_for(self, attempt: int, choice: int, text: str) -> None:
        wait_until(lambda: self.hear() and self.texts.get((attempt, choice)) == text, what=f"text {text!r}")


@pytest.fixture
def replies(queue_url: str) -> Iterator[Replies]:
    with Replies(redis_url(queue_url), byte_tokenizer()) as replies:
        yield replies


def test_text_comes_in_order_and_the_end_after_it(replies: Replies, queue_client: redis.Redis) -> None:
    listener = Listener(queue_client)
    first, second = replies.attend(prepared(claimed(), choices=2))
    assert first.is_interactive
    push(first, " Hé")
    push(second, "x")
    listener.wait_for(1, 0, "Hé")
    push(first, "llo")
    replies.ended(claimed())
    wait_until(lambda: listener.hear() and listener.ended == [1], what="the end")
    assert listener.texts == {(1, 0): "Héllo", (1, 1): "x"}


def test_what_nobody_heard_is_told_again(replies: Replies, queue_client: redis.Redis) -> None:
    """As after a restart of Redis: the worker is back on it before the listener is."""
    (generation,) = replies.attend(prepared(claimed()))
    push(generation, "early")
    wait_until(lambda: replies._unheard, what="an attempt to tell it")
    listener = Listener(queue_client)
    listener.wait_for(1, 0, "early")
    push(generation, ", late")
    listener.wait_for(1, 0, "early, late")


def test_a_caller_who_wants_no_stream_hears_of_the_end_alone(replies: Replies, queue_client: redis.Redis) -> None:
    listener = Listener(queue_client)
    (generation,) = replies.attend(prepared(claimed(), is_streamed=False))
    assert generation.on_token is None
    replies.ended(claimed(attempt=3))
    wait_until(lambda: listener.hear() and listener.ended == [3], what="the end")
    assert listener.texts == {}


def test_an_end_that_comes_while_others_are_told_something_holds_nobody_up(
    replies: Replies, queue_client: redis.Redis
) -> None:
    listener = Listener(queue_client)
    with replies._telling:
        replies.ended(claimed(attempt=3))
    wait_until(lambda: listener.hear() and listener.ended == [3], what="the end")


def test_an_answer_that_is_recorded_is_told_with_the_end_unless_it_is_long(
    replies: Replies, queue_client: redis.Redis
) -> None:
    """Whoever waits then need not ask the database for it."""
    listener = Listener(queue_client)
    long = "x" * (LONGEST_TOLD + 1)
    for attempt, response in ((1, '{"choices": []}'), (2, long)):
        replies.ended(claimed(attempt=attempt), outcome(attempt, response))
        wait_until(lambda attempt=attempt: listener.hear() and attempt in listener.ended, what="the end")
    assert listener.answers == [{"status_code": 200, "response": '{"choices": []}', "error_code": None}, None]


def test_a_request_that_somebody_waits_for_ends_with_its_time(replies: Replies) -> None:
    (bounded,) = replies.attend(prepared(claimed(expires_at=160.0, reply_to=None)))
    (unbounded,) = replies.attend(prepared(claimed(reply_to=None)))
    assert bounded.deadline is not None
    assert unbounded.deadline is None
