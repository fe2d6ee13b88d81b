"""`/v1/webhook_endpoints`: who is told of ended batches, as OpenAI's SDKs manage it (`client.webhooks`).

`GET /v1/webhook_endpoints/{id}/deliveries` is ours: what became of each event.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from jobs import webhooks
from jobs.gateway.errors import ApiError, not_found
from jobs.gateway.files import render_list
from jobs.gateway.identity import KnownCaller
from jobs.gateway.state import Gateway, TheGateway
from jobs.keys import Caller
from jobs.protocol import parse_as
from jobs.webhook_sender import send
from jobs.webhooks import Network, parse_networks
from storage import outbox
from storage.errors import PromptmillError
from storage.outbox import DeliveryRow, EndpointRow, render_event

router = APIRouter(prefix="/v1", tags=["webhooks"])

MAX_PAGE = 100
# A batch that there is not: receivers that look it up are told so.
TEST_BATCH = "batch_00000000000000000000000000000000"


class _Given(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


# What `jobs/webhooks.py` checks, for the OpenAPI document.
Url = Annotated[
    str, Field(json_schema_extra={"format": "uri", "pattern": "^https?://", "maxLength": webhooks.LONGEST_URL})
]
EventNames = Annotated[
    list[str], Field(json_schema_extra={"items": {"type": "string", "enum": list(webhooks.EVENTS)}, "minItems": 1})
]


class NewWebhook(_Given):
    url: Url
    event_types: EventNames
    name: str | None = None


class ChangedWebhook(_Given):
    url: Url | None = None
    event_types: EventNames | None = None
    name: str | None = None


class Rotation(_Given):
    keep_old_secret_active_for_24_hours: bool | None = None


class TestedEvent(_Given):
    event_type: Annotated[str, Field(json_schema_extra={"enum": list(webhooks.EVENTS)})]


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WebhookObject(_Answer):
    """disabled_at: when the receiver said that it is gone (410); null: it is alive. Instants are Unix seconds."""

    id: str
    object: Literal["webhook_endpoint"]
    name: str
    url: str
    event_types: list[str]
    signing_secret_hint: str
    created_at: int
    updated_at: int
    disabled_at: int | None


class WebhookWithSecret(WebhookObject):
    """signing_secret: shown now, and never again."""

    signing_secret: str


class WebhookList(_Answer):
    object: Literal["list"]
    data: list[WebhookObject]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedWebhook(_Answer):
    id: str
    object: Literal["webhook_endpoint.deleted"]
    deleted: bool


class WebhookTest(_Answer):
    object: Literal["webhook_endpoint.test"]
    webhook_endpoint_id: str
    event_type: str
    status_code: int
    success: Literal[True]


class EventTypes(_Answer):
    object: Literal["list"]
    data: list[str]


class Delivery(_Answer):
    """attempts: tries begun. next_try_at: null when there will be none. last_status: HTTP, of the last answer."""

    id: str
    object: Literal["webhook_delivery"]
    event_type: str
    attempts: int = Field(ge=0)
    created_at: int
    next_try_at: int | None
    delivered_at: int | None
    given_up_at: int | None
    last_status: int | None
    last_error: str | None


class DeliveryList(_Answer):
    object: Literal["list"]
    data: list[Delivery]
    has_more: bool
    first_id: str | None
    last_id: str | None


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """What the OpenAPI document says of a body that the route parses by itself."""
    content = {"application/json": {"schema": model.model_json_schema(ref_template="#/components/schemas/{model}")}}
    return {"requestBody": {"required": required, "content": content}}


@router.get("/webhook_event_types", summary="Events that there are", response_model=EventTypes)
def list_event_types(caller: KnownCaller) -> dict[str, Any]:
    return {"object": "list", "data": list(webhooks.EVENTS)}


@router.post(
    "/webhook_endpoints",
    summary="Be told when batches end",
    response_model=WebhookWithSecret,
    openapi_extra=body_of(NewWebhook),
)
async def create_webhook(http_request: Request, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    """The secret is in this answer alone."""
    given = parse_as(NewWebhook, await http_request.body())

    def create() -> EndpointRow:
        return webhooks.add_endpoint(
            gateway.database,
            tenant=caller.tenant,
            url=given.url,
            name=given.name,
            events=given.event_types,
            allowed=_allowed(gateway),
        )

    row = await run_in_threadpool(create)
    return {**render_endpoint(row), "signing_secret": row.secret}


@router.get("/webhook_endpoints", summary="List endpoints, the newest first", response_model=WebhookList)
def list_webhooks(
    gateway: TheGateway,
    caller: KnownCaller,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
    after: Annotated[str | None, Query(description="The id of the last endpoint of the page before.")] = None,
) -> dict[str, Any]:
    with gateway.database.read() as connection:
        rows = outbox.list_endpoints(connection, caller.tenant)
    if after is not None:
        place = next((n for n, row in enumerate(rows) if row.public_id == after), None)
        if place is None:
            raise not_found("webhook_endpoint", after)
        rows = rows[place + 1 :]
    return render_list([render_endpoint(row) for row in rows[:limit]], has_more=len(rows) > limit)


@router.get("/webhook_endpoints/{endpoint_id}", summary="Get an endpoint", response_model=WebhookObject)
def get_webhook(endpoint_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    return render_endpoint(_find(gateway, caller, endpoint_id))


@router.post(
    "/webhook_endpoints/{endpoint_id}",
    summary="Change an endpoint",
    response_model=WebhookObject,
    openapi_extra=body_of(ChangedWebhook),
)
async def change_webhook(
    endpoint_id: str, http_request: Request, gateway: TheGateway, caller: KnownCaller
) -> dict[str, Any]:
    """One that was disabled takes events again."""
    given = parse_as(ChangedWebhook, await http_request.body())

    def change() -> EndpointRow:
        return webhooks.change_endpoint(
            gateway.database,
            _find(gateway, caller, endpoint_id),
            url=given.url,
            name=given.name,
            events=given.event_types,
            allowed=_allowed(gateway),
        )

    return render_endpoint(await run_in_threadpool(change))


@router.delete("/webhook_endpoints/{endpoint_id}", summary="Delete an endpoint", response_model=DeletedWebhook)
def delete_webhook(endpoint_id: str, gateway: TheGateway, caller: KnownCaller) -> dict[str, Any]:
    row = _find(gateway, caller, endpoint_id)
    webhooks.remove_endpoint(gateway.database, row)
    return {"id": row.public_id, "object": "webhook_endpoint.deleted", "deleted": True}


@router.post(
    "/webhook_endpoints/{endpoint_id}/rotate_secret",
    summary="Give an endpoint a new secret",
    response_model=WebhookWithSecret,
    openapi_extra=body_of(Rotation, required=False),
)
async def rotate_secret(
    endpoint_id: str, http_request: Request, gateway: TheGateway, caller: KnownCaller
) -> dict[str, Any]:
    """With `keep_old_secret_active_for_24_hours` both sign for a day."""
    given = parse_as(Rotation, await http_request.body() or b"{}")

    def rotate() -> EndpointRow:
        row = _find(gateway, caller, endpoint_id)
        return webhooks.rotate_secret(
            gateway.database, row, keep_former=bool(given.keep_old_secret_active_for_24_hours)
        )

    row = await run_in_threadpool(rotate)
    return {**render_endpoint(row), "signing_secret": row.secret}


@router.post(
    "/webhook_endpoints/{endpoint_id}/test",
    summary="Send a sample event now",
    response_model=WebhookTest,
    openapi_extra=body_of(TestedEvent),
)
async def try_webhook(
    endpoint_id: str, http_request: Request, gateway: TheGateway, caller: KnownCaller
) -> dict[str, Any]:
    """Signed as a real one, about a batch that there is not. A receiver that cannot be reached is a 400."""
    given = parse_as(TestedEvent, await http_request.body())
    webhooks.join_events([given.event_type])
    row = await run_in_threadpool(_find, gateway, caller, endpoint_id)
    now = gateway.database.now()
    event_id = f"evt_test{row.public_id[len('we_') :]}"
    tried = await send(
        row,
        event_id,
        render_event(event_id, given.event_type, TEST_BATCH, now).encode(),
        now=now,
        timeout_s=gateway.settings.webhook.timeout_s,
        allowed=_allowed(gateway),
    )
    if tried.status is None:
        raise ApiError(400, f"the receiver was not reached: {tried.error}", code="webhook_not_reached", param="url")
    return {
        "object": "webhook_endpoint.test",
        "webhook_endpoint_id": row.public_id,
        "event_type": given.event_type,
        "status_code": tried.status,
        "success": True,
    }


@router.get(
    "/webhook_endpoints/{endpoint_id}/deliveries",
    summary="What became of each event, the newest first",
    response_model=DeliveryList,
)
def list_deliveries(
    endpoint_id: str,
    gateway: TheGateway,
    caller: KnownCaller,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> dict[str, Any]:
    row = _find(gateway, caller, endpoint_id)
    with gateway.database.read() as connection:
        found = outbox.deliveries_of(connection, row.id, limit + 1)
    return render_list([_render_delivery(each) for each in found[:limit]], has_more=len(found) > limit)


def render_endpoint(row: EndpointRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "object": "webhook_endpoint",
        "name": row.name,
        "url": row.url,
        "event_types": row.events.split(","),
        "signing_secret_hint": f"{webhooks.SECRET_PREFIX}...{row.secret[-4:]}",
        "created_at": int(row.created_at),
        "updated_at": int(row.updated_at),
        "disabled_at": _instant(row.disabled_at),
    }


def _render_delivery(row: DeliveryRow) -> dict[str, Any]:
    return {
        "id": row.public_id,
        "object": "webhook_delivery",
        "event_type": row.event,
        "attempts": row.attempts,
        "created_at": int(row.created_at),
        "next_try_at": _instant(row.next_try_at),
        "delivered_at": _instant(row.delivered_at),
        "given_up_at": _instant(row.given_up_at),
        "last_status": row.last_status,
        "last_error": row.last_error,
    }


def _instant(at: float | None) -> int | None:
    return None if at is None else int(at)


def _allowed(gateway: Gateway) -> tuple[Network, ...]:
    return parse_networks(gateway.settings.webhook.allowed_networks)


def _find(gateway: Gateway, caller: Caller, public_id: str) -> EndpointRow:
    try:
        return webhooks.find_endpoint(gateway.database, public_id, tenant=caller.tenant)
    except PromptmillError as error:
        if error.code != "webhook_endpoint_not_found":
            raise
        raise not_found("webhook_endpoint", public_id) from None
