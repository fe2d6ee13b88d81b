"""What Prometheus sees of the gateway: its calls, and how the work behind it stands.

Calls are counted as they end; the rest is read from the database and the queue when somebody asks. Nothing here names
a tenant, a batch or a text.
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from jobs.gateway.state import Gateway, TheGateway
from jobs.queue import queue_depth
from storage import queries
from storage.errors import PromptmillError
from storage.models import BatchStatus

router = APIRouter(tags=["health"])

BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class CallMetrics:
    """Counts calls; one for each application, so that tests and processes do not share numbers."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "promptmill_http_requests",
            "Calls that have ended, by method, route and status (0: cut off before an answer)",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "promptmill_http_request_duration_seconds",
            "From a call's headers to the end of its answer",
            ("method", "route"),
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        method = method if method in METHODS else "OTHER"  # a client may send any word, and each would stay for ever
        self._calls.labels(method, route, str(status)).inc()
        self._seconds.labels(method, route).observe(seconds)


OPEN_STATUSES = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)
METHODS = ("GET", "POST", "DELETE", "PATCH", "PUT", "HEAD", "OPTIONS")


@router.get("/metrics", summary="Numbers for Prometheus", response_class=Response)
def metrics(http_request: Request, gateway: TheGateway) -> Response:
    """Text in Prometheus' format. Keep it from the outside at the reverse proxy, if it is nobody's business."""
    calls: CallMetrics = http_request.app.state.calls
    text = generate_latest(calls.registry) + generate_latest(_standing(gateway))
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def _standing(gateway: Gateway) -> CollectorRegistry:
    """Gauges over the database and the queue, as far as they can be reached."""
    registry = CollectorRegistry()
    reached = Gauge("promptmill_reachable", "1: the service answered just now", ("service",), registry=registry)
    batches = Gauge("promptmill_batches", "Batches that have not ended, by status", ("status",), registry=registry)
    ready = Gauge("promptmill_workers_ready", "Workers that can take requests, by model", ("model",), registry=registry)
    depth = Gauge(
        "promptmill_queue_messages",
        "Messages that wait in the queue, by model and kind",
        ("model", "kind"),
        registry=registry,
    )
    waiting = Gauge(
        "promptmill_queued_requests", "Requests in the queue, by model and kind", ("model", "kind"), registry=registry
    )
    open_requests = Gauge(
        "promptmill_open_requests",
        "Requests of unfinished batches that have no result yet, by model",
        ("model",),
        registry=registry,
    )
    models: set[str] = set()
    try:
        now = gateway.database.now()
        with gateway.database.read() as connection:
            for status in OPEN_STATUSES:
                batches.labels(status.value).set(0)
            for worker in queries.live_workers(connection, now):
                ready.labels(worker.model).inc()
                models.add(worker.model)
            for batch in queries.unfinished_batches(connection):
                batches.labels(batch.status.value).inc()
                open_requests.labels(batch.model).inc(batch.remaining_requests)
                models.add(batch.model)
            for (model, is_interactive), count in queries.queued_counts(connection).items():
                waiting.labels(model, _kind(is_interactive)).set(count)
        reached.labels("database").set(1)
    except PromptmillError:
        reached.labels("database").set(0)
    try:
        for model in sorted(models):
            found = queue_depth(gateway.celery, model)
            depth.labels(model, "interactive").set(found.interactive)
            depth.labels(model, "bulk").set(found.bulk)
        reached.labels("queue").set(1)
    except PromptmillError:
        reached.labels("queue").set(0)
    return registry


def _kind(is_interactive: bool) -> str:
    return "interactive" if is_interactive else "bulk"
