"""The header by which a caller names a call, so that the same call again is the same call."""

from __future__ import annotations

from starlette.requests import Request

from jobs.gateway.errors import ApiError

IDEMPOTENCY_KEY = "Idempotency-Key"
MAX_KEY_CHARACTERS = 255


def idempotency_key_of(http_request: Request) -> str | None:
    """The key of a call, if it has one. Raises ApiError 400 for one that is empty, too long or not printable."""
    key = http_request.headers.get(IDEMPOTENCY_KEY)
    if key is None:
        return None
    if not key:
        raise _refusal("empty_string", "the header is empty; give it a value, or leave it out")
    if len(key) > MAX_KEY_CHARACTERS:
        length = f"{len(key)} characters, which exceeds {MAX_KEY_CHARACTERS}"
        raise _refusal("string_above_max_length", f"the value has {length}; shorten it")
    if not key.isprintable():
        raise _refusal("invalid_value", "the value has characters that cannot be printed; remove them")
    return key


def _refusal(code: str, message: str) -> ApiError:
    return ApiError(400, f"{IDEMPOTENCY_KEY}: {message}", code=code, param=IDEMPOTENCY_KEY)
