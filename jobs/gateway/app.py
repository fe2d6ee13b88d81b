"""The gateway's application: what it opens, what it holds, and which routes it has.

Everything a call needs hangs on `app.state.gateway`; nothing is kept between calls that is not in the database, so any
number of gateways may run side by side.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from types import MappingProxyType

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from jobs.gateway import batches, completions, extensions, files, health, metrics, models, usage, webhooks
from jobs.gateway.completions import DirectRoute
from jobs.gateway.edge import Edge
from jobs.gateway.errors import add_error_handlers
from jobs.gateway.identity import check_binding
from jobs.gateway.metrics import CallMetrics
from jobs.gateway.openapi import describe_api
from jobs.gateway.replies import Replies
from jobs.gateway.standing import Standing
from jobs.gateway.state import Gateway
from jobs.keys import KeyRing
from jobs.queue import make_app, redis_url
from jobs.queue_server import open_queue_server
from jobs.quotas import RequestRate, TenantBook
from jobs.settings import Settings
from jobs.up import with_queue_url
from jobs.validation import Validator
from storage.database import open_database, upgrade_schema
from storage.errors import PromptmillError


class Application(FastAPI):
    """FastAPI, and a short way to the routes of calls: what its layers and its router do takes longer than they do.

    short_ways: by method and path, what answers in FastAPI's place.
    """

    short_ways: Mapping[tuple[str, str], ASGIApp] = MappingProxyType({})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self.short_ways.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if answer is None:
            await super().__call__(scope, receive, send)
        else:
            scope["app"] = self
            await answer(scope, receive, send)


def create_app(settings: Settings) -> Application:
    """The application. It opens the database and the queue when it starts, and closes them when it stops."""
    is_open = check_binding(settings.gateway.host, open_on_loopback=settings.gateway.open_on_loopback)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            try:
                await _open(app, settings, stack)
            except PromptmillError as error:
                app.state.start_failure = error  # for `Server.run`: uvicorn keeps to itself what happens here
                raise
            yield

    app = Application(
        title="promptmill",
        version=version("promptmill"),
        summary="An OpenAI-compatible gateway to prompts run in bulk.",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    calls = CallMetrics()
    app.state.calls = calls
    app.state.is_open = is_open
    app.state.start_failure = None
    bounds = settings.gateway.model_dump(include={"max_body_bytes", "max_upload_bytes", "receive_timeout_s"})
    app.add_middleware(Edge, **bounds, observe=calls.observe)
    app.short_ways = {
        (method, route.path): Edge(route.answer, **bounds, observe=calls.observe)
        for route in completions.router.routes
        if isinstance(route, DirectRoute)
        for method in route.methods or ()
    }
    add_error_handlers(app)
    _add_routes(app)
    describe_api(app)
    return app


async def _open(app: FastAPI, settings: Settings, stack: AsyncExitStack) -> None:
    """Open what the routes work with, to be closed by `stack`."""
    database = stack.enter_context(open_database(settings.database.url))
    await run_in_threadpool(upgrade_schema, database)
    server = await run_in_threadpool(open_queue_server, settings)
    stack.callback(server.stop)
    served = with_queue_url(settings, server.url)
    celery = make_app(served.queue)
    stack.callback(celery.close)
    served.files_dir.mkdir(parents=True, exist_ok=True)
    app.state.gateway = Gateway(served, database, celery, served.files_dir)
    app.state.keys = KeyRing(database)
    app.state.tenants = TenantBook(database)
    app.state.rate = RequestRate(redis_url(served.queue.url))
    stack.push_async_callback(app.state.rate.close)
    app.state.standing = Standing(database, served.artifacts_dir)
    stack.push_async_callback(app.state.standing.close)
    app.state.replies = await stack.enter_async_context(Replies(app.state.gateway, redis_url(served.queue.url)))
    app.state.validator = stack.enter_context(Validator(database, served))


def _add_routes(app: FastAPI) -> None:
    # Routes are tried in turn, each at a cost: first those of which there are many calls, and somebody waits for each.
    app.include_router(completions.router)
    app.include_router(health.router)
    app.include_router(metrics.router)
    app.include_router(files.router)
    app.include_router(batches.router)
    app.include_router(extensions.router)
    app.include_router(webhooks.router)
    app.include_router(usage.router)
    app.include_router(models.router)
