"""Who calls: a bearer key, looked up, and the tenant it stands for. Every route but the health checks depends on it.

Without a key only a gateway answers that is bound to loopback and told to (PROMPTMILL_GATEWAY_OPEN_ON_LOOPBACK). Even
then a call that came through a proxy, or that names another host (a web page whose name was pointed at this machine),
needs one.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from jobs.gateway.errors import ApiError
from jobs.keys import PREFIX, KeyRefused, KeyRing
from jobs.keys import Caller as Caller
from jobs.quotas import RequestRate, TenantBook, rate_exceeded
from storage.errors import SettingsError

OPEN_TENANT = "default"
# Headers by which a proxy says for whom it asks.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")

_bearer = HTTPBearer(auto_error=False, description="An API key: `promptmill key create`.")


async def caller(
    http_request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Caller:
    """The caller of a request. Raises ApiError 401, code `invalid_api_key`, in OpenAI's form."""
    key = bearer.credentials if bearer is not None else ""
    keys: KeyRing = http_request.app.state.keys
    if http_request.app.state.is_open and not key.startswith(PREFIX) and is_from_here(http_request):
        await _count(http_request, OPEN_TENANT)
        return Caller(OPEN_TENANT, None, None)
    if not key:
        raise _refused(
            "no API key was given; send it as `Authorization: Bearer pm-...`, or have one made: promptmill key create"
        )
    try:
        found = keys.known(key)
        if found is None:
            found = await run_in_threadpool(keys.find, key)
    except KeyRefused as error:
        raise _refused(error.message) from None
    http_request.state.caller = found
    await _count(http_request, found.tenant)
    return found


async def _count(http_request: Request, tenant: str) -> None:
    """Count the call against the tenant's requests a minute. Raises QuotaExceeded."""
    tenants: TenantBook = http_request.app.state.tenants
    rate: RequestRate = http_request.app.state.rate
    known = tenants.known(tenant)
    row = known[0] if known is not None else await run_in_threadpool(tenants.find, tenant)
    if row is None or row.max_requests_per_minute is None:
        return
    admission = await rate.admit(tenant, row.max_requests_per_minute)
    if not admission.is_admitted:
        raise rate_exceeded(tenant, row.max_requests_per_minute, admission)


async def caller_of(http_request: Request) -> Caller:
    """The same for a route that is given its request alone."""
    return await caller(http_request, await _bearer(http_request))


KnownCaller = Annotated[Caller, Depends(caller)]
# How such a route describes it, in `openapi_extra`.
BEARER_SECURITY: list[dict[str, list[str]]] = [{_bearer.scheme_name: []}]


def check_binding(host: str, *, open_on_loopback: bool) -> bool:
    """Whether calls need no key. Raises SettingsError when that is wanted for an address that others can reach."""
    if open_on_loopback and not is_loopback(host):
        raise SettingsError(
            f"PROMPTMILL_GATEWAY_OPEN_ON_LOOPBACK is on and PROMPTMILL_GATEWAY_HOST is {host}, which others can reach; "
            "bind to 127.0.0.1, or switch it off and make keys: promptmill key create"
        )
    return open_on_loopback


@lru_cache(maxsize=64)
def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that is bound to `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_from_here(http_request: Request) -> bool:
    """Whether a call came straight from this machine and was meant for it."""
    client = http_request.client
    named = http_request.headers.get("host", "")
    host = named.rpartition("]")[0].lstrip("[") if named.startswith("[") else named.partition(":")[0]
    return (
        (client is None or is_loopback(client.host))
        and is_loopback(host)
        and not any(header in http_request.headers for header in PROXY_HEADERS)
    )


def _refused(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        type="invalid_request_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
