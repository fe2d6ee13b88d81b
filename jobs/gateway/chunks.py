"""An answer as OpenAI's server-sent events: chunk objects, byte for byte what its SDKs expect.

Pure rendering. A chat stream opens each choice with its role; every choice ends with a chunk that has its finish
reason; then the usage, if asked for, in a chunk without choices; then `[DONE]`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jobs.protocol import Endpoint, dump_json

DONE = b"data: [DONE]\n\n"
# A comment, which every reader of events passes over: proxies do not close a stream for its silence.
HEARTBEAT = b": waiting\n\n"


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunks of one answer. id: with its kind's prefix. with_usage: each chunk has a `usage`, null but in one."""

    endpoint: Endpoint
    id: str
    created: int
    model: str
    system_fingerprint: str | None
    with_usage: bool

    def opening(self, choice: int) -> bytes:
        """The role, which only a chat has."""
        if self.endpoint is Endpoint.COMPLETIONS:
            return b""
        return self._choice(choice, {"delta": {"role": "assistant", "content": "", "refusal": None}})

    def text(self, choice: int, text: str, logprobs: object = None) -> bytes:
        value = {"text": text} if self.endpoint is Endpoint.COMPLETIONS else {"delta": {"content": text}}
        return self._choice(choice, value, logprobs)

    def finish(self, choice: int, reason: str) -> bytes:
        value: dict[str, object] = {"text": ""} if self.endpoint is Endpoint.COMPLETIONS else {"delta": {}}
        return self._choice(choice, value, finish_reason=reason)

    def usage(self, usage: object) -> bytes:
        return self._event([], usage)

    def _choice(
        self, index: int, value: Mapping[str, Any], logprobs: object = None, finish_reason: str | None = None
    ) -> bytes:
        return self._event([{"index": index, **value, "logprobs": logprobs, "finish_reason": finish_reason}])

    def _event(self, choices: list[dict[str, Any]], usage: object = None) -> bytes:
        kind = "text_completion" if self.endpoint is Endpoint.COMPLETIONS else "chat.completion.chunk"
        chunk: dict[str, object] = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            "choices": choices,
        }
        if self.with_usage:
            chunk["usage"] = usage
        return event(chunk)


def event(value: object) -> bytes:
    return f"data: {dump_json(value)}\n\n".encode()
