"""What a tenant may do at once: requests a minute, queued prompt tokens, running batches, stored bytes.

The first is counted in Redis, where all gateway processes meet; the others are sums over rows, read when something is
asked for. A tenant without a quota pays for none of this.

When Redis is away the rate is not enforced: what keeps a tenant from harming others for good (tokens, batches, bytes)
is bounded in the database, and refusing everybody's calls would make an outage of the queue, which loses no work, an
outage of the door.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any

import redis.asyncio
import structlog
from redis.exceptions import RedisError

from storage import queries
from storage.database import Connection, Database
from storage.errors import PromptmillError
from storage.queries import TenantRow

WINDOW_S = 60
# What a process knows of a tenant's quotas it holds for true for so long.
KNOWN_FOR_S = 2.0
MOST_KNOWN = 10_000
# Redis answers in less than a millisecond. A call waits no longer for it than this, and then not again for a while.
REDIS_PATIENCE_S = 0.25
REDIS_PAUSE_S = 5.0
# A running batch may end at any moment; sooner than this nobody need look.
BATCH_RETRY_S = 30.0

log = structlog.get_logger(__name__)

# A hash of seconds -> calls in that second: at most 61 fields, whatever the rate. One step for Redis, so that two
# gateways cannot both take the last place. By Redis's clock, so that theirs need not agree.
_ADMIT = """
local now = tonumber(redis.call('TIME')[1])
local window, bound = tonumber(ARGV[1]), tonumber(ARGV[2])
local fields = redis.call('HGETALL', KEYS[1])
local calls, seconds = 0, {}
for i = 1, #fields, 2 do
  local second = tonumber(fields[i])
  if second <= now - window then
    redis.call('HDEL', KEYS[1], fields[i])
  else
    calls = calls + tonumber(fields[i + 1])
    seconds[#seconds + 1] = {second, tonumber(fields[i + 1])}
  end
end
if calls < bound then
  redis.call('HINCRBY', KEYS[1], now, 1)
  redis.call('EXPIRE', KEYS[1], window + 1)
  return {1, calls + 1, 0}
end
table.sort(seconds, function(a, b) return a[1] < b[1] end)
local over, free_in = calls - bound, window
for _, each in ipairs(seconds) do
  over = over - each[2]
  if over < 0 then
    free_in = each[1] + window - now
    break
  end
end
return {0, calls, free_in}
"""


class QuotaExceeded(PromptmillError):
    """A tenant wants more than it may have at once. retry_after_s: None: waiting alone does not help."""

    def __init__(self, message: str, *, code: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, code=code, retryable=retry_after_s is not None)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Admission:
    """Whether a call may pass. calls: in the last minute, with this one if it passed."""

    is_admitted: bool
    calls: int
    retry_after_s: float


class TenantBook:
    """Tenants' quotas, remembered for two seconds. Threads may share it."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._known: dict[str, tuple[float, TenantRow | None]] = {}
        self._lock = threading.Lock()

    def known(self, tenant: str) -> tuple[TenantRow | None] | None:
        """The tenant's row, in a tuple, if it was read a moment ago. Costs no read."""
        found = self._known.get(tenant)
        return None if found is None or time.monotonic() - found[0] > KNOWN_FOR_S else (found[1],)

    def find(self, tenant: str) -> TenantRow | None:
        known = self.known(tenant)
        if known is not None:
            return known[0]
        with self._database.read() as connection:
            row = queries.find_tenant(connection, tenant)
        with self._lock:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            self._known[tenant] = (time.monotonic(), row)
        return row


class RequestRate:
    """Counts the calls of the last minute by tenant. One for each process; all count in the same Redis."""

    def __init__(self, url: str) -> None:
        """url: of Redis, as the redis package writes it."""
        self._client: Any = redis.asyncio.Redis.from_url(
            url, socket_timeout=REDIS_PATIENCE_S, socket_connect_timeout=REDIS_PATIENCE_S
        )
        self._admit = self._client.register_script(_ADMIT)
        self._away_until = 0.0

    async def admit(self, tenant: str, bound: int) -> Admission:
        """Count a call, unless there were `bound` in the last minute."""
        if time.monotonic() < self._away_until:
            return Admission(True, 0, 0.0)
        try:
            admitted, calls, free_in = await self._admit(keys=[rate_key(tenant)], args=[WINDOW_S, bound])
        except (RedisError, OSError) as error:
            self._away_until = time.monotonic() + REDIS_PAUSE_S
            log.warning("rate_not_enforced", reason=type(error).__name__)
            return Admission(True, 0, 0.0)
        return Admission(bool(admitted), calls, float(max(1, free_in)))

    async def calls(self, tenant: str) -> int | None:
        """Calls in the last minute; None: Redis does not say."""
        try:
            fields = await self._client.hgetall(rate_key(tenant))
            now, _ = await self._client.time()
        except (RedisError, OSError):
            return None
        return sum(int(calls) for second, calls in fields.items() if int(second) > now - WINDOW_S)

    async def close(self) -> None:
        await self._client.aclose()


def rate_key(tenant: str) -> str:
    return f"promptmill.rate.{tenant}"


def rate_exceeded(tenant: str, bound: int, admission: Admission) -> QuotaExceeded:
    return QuotaExceeded(
        f"tenant {tenant} made {admission.calls} calls in the last minute and may make {bound}; "
        f"wait {admission.retry_after_s:.0f} s, or have the quota raised: promptmill tenant set",
        code="rate_limit_exceeded",
        retry_after_s=admission.retry_after_s,
    )


def check_storage(connection: Connection, tenant: str, added: int) -> None:
    """Raise QuotaExceeded (insufficient_quota) when a file of `added` bytes, whose row is written, is too much."""
    quotas = queries.find_tenant(connection, tenant)
    if quotas is None or quotas.max_storage_bytes is None:
        return
    stored = queries.stored_bytes(connection, tenant)
    if stored > quotas.max_storage_bytes:
        raise QuotaExceeded(
            f"tenant {tenant} stores {stored - added} bytes, this adds {added}, and {quotas.max_storage_bytes} are "
            "allowed; "
            "delete files, or have the quota raised: promptmill tenant set",
            code="insufficient_quota",
        )


def check_running_batches(connection: Connection, tenant: str) -> None:
    """Raise QuotaExceeded (rate_limit_exceeded) when one batch more would be too many. Hold the tenant's lock
    (`transitions.lock_tenant`), or two callers may both take the last place."""
    quotas = queries.find_tenant(connection, tenant)
    if quotas is None or quotas.max_running_batches is None:
        return
    running = queries.running_batches(connection, tenant)
    if running >= quotas.max_running_batches:
        raise QuotaExceeded(
            f"tenant {tenant} has {running} batches that have not ended and may have {quotas.max_running_batches}; "
            "wait for one to end or cancel one, or have the quota raised: promptmill tenant set",
            code="rate_limit_exceeded",
            retry_after_s=BATCH_RETRY_S,
        )


def check_queued_tokens(
    connection: Connection, tenant: str, *, adding: int = 0, up_to_batch_id: int | None = None
) -> None:
    """Raise QuotaExceeded (token_limit_exceeded) when a tenant has queued more prompt tokens than it may.

    adding: of a request that is not written yet. up_to_batch_id: of a batch whose lines are; later ones do not count
    against it.
    """
    quotas = queries.find_tenant(connection, tenant)
    if quotas is None or quotas.max_queued_prompt_tokens is None:
        return
    queued = queries.queued_prompt_tokens(connection, tenant, up_to_batch_id=up_to_batch_id) + adding
    if queued > quotas.max_queued_prompt_tokens:
        raise QuotaExceeded(
            f"tenant {tenant} would have {queued} prompt tokens queued (estimated) and may have "
            f"{quotas.max_queued_prompt_tokens}; wait until earlier batches have run, or have the quota raised: "
            "promptmill tenant set",
            code="token_limit_exceeded",
            retry_after_s=BATCH_RETRY_S,
        )
