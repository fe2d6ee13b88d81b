"""Tells callers who wait how their requests go: new text as it comes, and that the answer is recorded.

Text goes out from one thread, never the engine's: that one only hands over token ids. The end of a request of which
nothing was told before goes out from the thread that ends it, if nobody else is just telling something. What is told is
no more than a courtesy; the answer is in the database, and a caller who hears nothing looks there. So nothing here is
tried for ever and nothing fails because of it.

A message is JSON on the caller's channel (`reply_to`), a list of
`{"request": id, "attempt": n, "text": [[choice, at, text], ...], "ended": bool}`. `at` counts the characters of that
choice's text before this piece, so that a listener who missed some, or hears a second attempt, knows. Text is told only
once no later token can take it back: whole characters, and nothing that may be the beginning of a stop text. The end of
a text is not told: it is in the answer. With the end comes `"answer": {"status_code", "response", "error_code"}`, if
that is short and its transaction is committed; without it, whoever waits looks in the database.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import redis
import structlog

from jobs.protocol import Endpoint
from jobs.queue import KeptConnection
from storage.transitions import ClaimedRequest, RequestOutcome
from workers.answers import PreparedRequest
from workers.engine.request import GenerationRequest
from workers.tokenizer import IncrementalDecoder, Tokenizer

log = structlog.get_logger()

# Text that comes within this time goes out together: far below what an eye notices, far above what a message costs.
GROUP_S = 0.01
# What nobody heard is told again after this pause; a caller's connection that broke is back by then.
AGAIN_S = 0.25
# An end that could not be told for so long is forgotten: the caller has looked in the database by then.
FORGET_END_S = 5.0
# A longer answer is not told: reading it costs little then, and Redis keeps nothing large for a listener that is slow.
LONGEST_TOLD = 65_536  # characters


class SettledText:
    """The text of one choice as far as it stands, token by token. drops_space: its first space is not its own."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str], *, drops_space: bool) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = stops
        self._overlap = max((len(stop) for stop in stops), default=1) - 1
        self._drops_space = drops_space
        self._text = ""
        self._settled = 0
        self._is_over = False

    @property
    def text(self) -> str:
        """What will be in the answer whatever comes."""
        begin = 1 if self._drops_space and self._text.startswith(" ") else 0
        return self._text[begin : self._settled]

    def push(self, token_id: int) -> None:
        if self._is_over:
            return
        piece = self._decoder.push(token_id)
        if not piece:
            return
        begin = max(0, len(self._text) - self._overlap)
        self._text += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._text.find(stop, begin)) >= 0]
        if found:
            self._settled = min(found)[1]
            self._is_over = True
        else:
            self._settled = len(self._text) - self._held_back()

    def _held_back(self) -> int:
        """Characters at the end that may be the beginning of a stop."""
        most = min(self._overlap, len(self._text))
        return next(
            (
                length
                for length in range(most, 0, -1)
                if any(len(stop) > length and self._text.endswith(stop[:length]) for stop in self._stops)
            ),
            0,
        )


@dataclass(slots=True, eq=False)
class _Reply:
    """What one attempt has to tell. told: characters of each choice that somebody heard. answer: recorded already."""

    request: ClaimedRequest
    channel: str
    texts: tuple[SettledText, ...]
    told: list[int]
    ended_at: float | None = None  # monotonic seconds
    answer: RequestOutcome | None = None

    def news(self) -> dict[str, Any] | None:
        pieces = []
        for choice, (settled, told) in enumerate(zip(self.texts, self.told, strict=True)):
            text = settled.text
            if len(text) > told:
                pieces.append([choice, told, text[told:]])
        if not pieces and self.ended_at is None:
            return None
        is_ended = self.ended_at is not None
        news = {"request": self.request.id, "attempt": self.request.attempt, "text": pieces, "ended": is_ended}
        if self.answer is not None and len(self.answer.response or "") <= LONGEST_TOLD:
            news["answer"] = {
                "status_code": self.answer.status_code,
                "response": self.answer.response,
                "error_code": self.answer.error_code,
            }
        return news


@dataclass(frozen=True, slots=True)
class _Token:
    reply: _Reply
    choice: int
    token_id: int


class Replies:
    """One for each worker. Use as `with Replies(...) as replies`."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        """url: of Redis, as the redis package writes it."""
        self._redis = KeptConnection(url, socket_timeout=5, socket_connect_timeout=5)
        self._telling = threading.Lock()  # held by who uses the connection
        self._tokenizer = tokenizer
        self._handed: queue.SimpleQueue[_Token | _Reply | None] = queue.SimpleQueue()
        self._open: dict[tuple[int, int], _Reply] = {}  # by request and attempt
        self._unheard: dict[int, _Reply] = {}
        self._again_at = 0.0
        self._is_away = False
        self._thread = threading.Thread(target=self._loop, name="replies", daemon=True)
        self._thread.start()

    def attend(self, prepared: PreparedRequest) -> tuple[GenerationRequest, ...]:
        """What the engine is asked for a request that somebody waits for: first in line, bounded, and listened to."""
        claimed = prepared.claimed
        deadline = None
        if claimed.expires_at is not None:
            deadline = time.monotonic() + max(0.0, claimed.expires_at - claimed.claimed_at)
        generations = [
            replace(generation, is_interactive=True, deadline=deadline) for generation in prepared.generations
        ]
        if claimed.reply_to is None or not prepared.is_streamed:
            return tuple(generations)
        drops_space = prepared.endpoint is Endpoint.CHAT and self._tokenizer.adds_space_prefix
        texts = tuple(SettledText(self._tokenizer, prepared.stop_texts, drops_space=drops_space) for _ in generations)
        reply = _Reply(claimed, claimed.reply_to, texts, [0] * len(texts))
        self._open[claimed.id, claimed.attempt] = reply
        return tuple(
            replace(generation, on_token=self._listener(reply, choice, generation.on_token))
            for choice, generation in enumerate(generations)
        )

    def ended(self, claimed: ClaimedRequest, answer: RequestOutcome | None = None) -> None:
        """This attempt is over. answer: as it was recorded, committed; None: the caller had better look."""
        if claimed.reply_to is None:
            return
        reply = self._open.pop((claimed.id, claimed.attempt), None)
        is_first = reply is None
        if reply is None:
            reply = _Reply(claimed, claimed.reply_to, (), [])
        reply.answer = answer
        if not (is_first and self._tell_end(reply)):
            self._handed.put(reply)

    def close(self) -> None:
        """Tell what was handed over, once, then stop."""
        self._handed.put(None)
        self._thread.join()
        self._redis.close()

    def __enter__(self) -> Replies:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _listener(self, reply: _Reply, choice: int, then: Callable[[int], bool] | None) -> Callable[[int], bool]:
        """Runs in the engine's thread."""

        def on_token(token_id: int) -> bool:
            self._handed.put(_Token(reply, choice, token_id))
            return then(token_id) if then is not None else False

        return on_token

    def _tell_end(self, reply: _Reply) -> bool:
        """Send an end from this thread. False: it was not heard, or others are told something, or Redis is away."""
        if self._is_away or not self._telling.acquire(blocking=False):
            return False
        try:
            reply.ended_at = time.monotonic()
            return bool(self._publish({reply.channel: _message([reply.news()])}))
        finally:
            self._telling.release()

    def _loop(self) -> None:
        told_at = 0.0
        while True:
            batch, is_urgent, is_last = self._collect(AGAIN_S if self._unheard else None)
            while not (is_urgent or is_last) and (wait_s := told_at + GROUP_S - time.monotonic()) > 0:
                more, is_urgent, is_last = self._collect(wait_s)
                batch |= more
            self._tell(batch)
            told_at = time.monotonic()
            if is_last:
                return

    def _collect(self, wait_s: float | None) -> tuple[dict[int, _Reply], bool, bool]:
        """What was handed over, after a wait for the first of it. Returns (replies, is one ended, is this the last)."""
        replies: dict[int, _Reply] = {}
        is_urgent = False
        try:
            entry = self._handed.get(timeout=wait_s)
            while entry is not None:
                if isinstance(entry, _Token):
                    entry.reply.texts[entry.choice].push(entry.token_id)
                    replies[id(entry.reply)] = entry.reply
                else:
                    entry.ended_at = time.monotonic()
                    replies[id(entry)] = entry
                    is_urgent = True
                entry = self._handed.get_nowait()
        except queue.Empty:
            return replies, is_urgent, False
        return replies, is_urgent, True

    def _tell(self, replies: dict[int, _Reply]) -> None:
        """Send what is new of these, one message for each channel. What nobody heard is kept, to be told again."""
        if time.monotonic() < self._again_at:
            replies = {key: reply for key, reply in replies.items() if key not in self._unheard}
        else:
            replies, self._unheard = self._unheard | replies, {}
            self._again_at = time.monotonic() + AGAIN_S
        by_channel: dict[str, list[tuple[_Reply, dict[str, Any]]]] = defaultdict(list)
        for reply in replies.values():
            news = reply.news()
            if news is not None:
                by_channel[reply.channel].append((reply, news))
        if not by_channel:
            return
        messages = {channel: _message([news for _, news in told]) for channel, told in by_channel.items()}
        with self._telling:
            heard = self._publish(messages)
        if self._is_away:
            time.sleep(AGAIN_S)
        now = time.monotonic()
        for channel, told in by_channel.items():
            for reply, news in told:
                if channel in heard:
                    for choice, at, text in news["text"]:
                        reply.told[choice] = at + len(text)
                elif reply.ended_at is None or now - reply.ended_at < FORGET_END_S:
                    self._unheard[id(reply)] = reply

    def _publish(self, messages: dict[str, str]) -> set[str]:
        """Returns the channels on which somebody listened."""
        try:
            heard = {channel for channel, message in messages.items() if self._redis.run("PUBLISH", channel, message)}
        except (redis.RedisError, OSError) as error:
            if not self._is_away:
                log.warning("callers_not_told", reason=type(error).__name__)
            self._is_away = True
            return set()
        self._is_away = False
        return heard


def _message(news: Sequence[dict[str, Any] | None]) -> str:
    return json.dumps(news, separators=(",", ":"))
