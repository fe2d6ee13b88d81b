"""`GET /v1/usage`: what the caller's tenant uses of its quotas. An extension; OpenAI has no such call."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict

from jobs.gateway.identity import KnownCaller
from jobs.gateway.state import TheGateway
from jobs.quotas import RequestRate
from storage import queries
from storage.queries import TenantRow, TenantUsage

router = APIRouter(prefix="/v1", tags=["usage"])


class Share(BaseModel):
    """used: null where it is not known. limit: null where there is none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    used: int | None
    limit: int | None


class Usage(BaseModel):
    """requests_per_minute: calls of the last minute. queued_prompt_tokens: estimated, of requests without an answer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    object: Literal["usage"]
    tenant: str
    api_key: str | None
    requests_per_minute: Share
    queued_prompt_tokens: Share
    running_batches: Share
    storage_bytes: Share


@router.get("/usage", summary="What your tenant uses of its quotas", response_model=Usage)
async def get_usage(http_request: Request, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """Calls a minute are counted for tenants that have a bound on them."""

    def read() -> tuple[TenantRow | None, TenantUsage]:
        with gateway.database.read() as connection:
            return queries.find_tenant(connection, caller.tenant), queries.tenant_usage(connection, caller.tenant)

    row, usage = await run_in_threadpool(read)
    rate: RequestRate = http_request.app.state.rate
    bound = row.max_requests_per_minute if row else None
    calls = None if bound is None else await rate.calls(caller.tenant)
    return {
        "object": "usage",
        "tenant": caller.tenant,
        "api_key": caller.key_name,
        "requests_per_minute": {"used": calls, "limit": bound},
        "queued_prompt_tokens": {
            "used": usage.queued_prompt_tokens,
            "limit": row.max_queued_prompt_tokens if row else None,
        },
        "running_batches": {"used": usage.running_batches, "limit": row.max_running_batches if row else None},
        "storage_bytes": {"used": usage.storage_bytes, "limit": row.max_storage_bytes if row else None},
    }
