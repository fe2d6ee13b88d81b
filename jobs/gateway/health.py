"""Whether this process lives, and whether it can work. Asked by load balancers, without a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import structlog
from fastapi import APIRouter
from fastapi.responses import JSONResponse

from jobs.gateway.state import TheGateway
from jobs.queue import ping
from storage.database import check_schema
from storage.errors import PromptmillError

router = APIRouter(tags=["health"])
log = structlog.get_logger(__name__)

READY = "ok"


@router.get("/healthz", summary="The process lives")
def healthz() -> JSONResponse:
    """Looks at nothing else: a database that is away is no reason to restart the gateway."""
    return JSONResponse({"status": READY})


@router.get(
    "/readyz", summary="It can take work: database, schema, queue", responses={503: {"description": "It cannot."}}
)
def readyz(gateway: TheGateway) -> JSONResponse:
    """Each check says `ok` or the code of what is wrong; the reasons, which may name hosts, stand in the log."""
    checks = {"database": _code(check_schema, gateway.database), "queue": _code(ping, gateway.celery)}
    is_ready = all(found == READY for found in checks.values())
    return JSONResponse(
        {"status": READY if is_ready else "unavailable", "checks": checks}, status_code=200 if is_ready else 503
    )


def _code(check: Callable[[Any], None], service: object) -> str:
    try:
        check(service)
    except PromptmillError as error:
        log.warning("not_ready", code=error.code, reason=error.message)
        return error.code
    return READY
