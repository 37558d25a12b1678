"""What monitoring reads at ``/metrics``: the service's counts as they are, and times measured here."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamakv.server.chunks import Pace
from llamakv.server.contract import Service

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SPEEDS = (0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)

CLIENT_GONE = 499
"""What nginx logs for a client that did not wait; never sent."""

_GAUGES = (
    ("requests_active", "Requests being answered", "n_active"),
    ("requests_waiting", "Requests in the queue", "n_waiting"),
    ("sequences_live", "Sequences in memory", "n_live"),
    ("sequences_max", "Sequences there may be", "n_sequences_max"),
    ("cells_used", "Cells in use, shared ones counted once", "n_cells"),
    ("cells_pinned", "Cells of pinned prefixes", "n_cells_pinned"),
    ("cells_max", "Cells there may be now", "n_cells_max"),
    ("context_cells", "Cells of the present context", "n_ctx"),
)
_SUMS = (
    ("prompt_tokens", "Tokens of prompts", "n_prompt_tokens"),
    ("evaluated_tokens", "Tokens of prompts that were read", "n_evaluated"),
    ("generated_tokens", "Tokens written", "n_generated"),
    ("answers_sent_back", "Times that an answer gave its cells to others, to be read again", "n_sent_back"),
    ("saves", "Saves to the store", "n_saves"),
    ("save_failures", "Saves that failed", "n_save_failures"),
    ("sequences_dropped", "Conversations dropped from memory", "n_dropped"),
)


class Metrics:
    """The metrics of one application."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, service: Service) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_ServiceCollector(service))
        ProcessCollector(registry=self._registry)
        self._requests = Counter("llamakv_http_requests", "Requests", ("endpoint", "status"), registry=self._registry)
        self._whole_s = self._histogram("request_seconds", "From a request for text to the end of its answer", _SECONDS)
        self._first_s = self._histogram(
            "first_token_seconds", "From a request to the first piece of its answer", _SECONDS
        )
        self._queue_s = self._histogram("queue_seconds", "From when a request was prepared to its turn", _SECONDS)
        self._speed = self._histogram("tokens_per_second", "Tokens of an answer after the first, a second", _SPEEDS)

    def _histogram(self, name: str, told: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"llamakv_{name}", told, buckets=buckets, registry=self._registry)

    def text_ended(self, pace: Pace) -> None:
        """Count the times of a request for text, however it ended."""
        self._whole_s.observe(perf_counter() - pace.began_s)
        if pace.usage is not None:
            self._queue_s.observe(pace.usage.queued_s)
        if pace.first_s is None or pace.ended_s is None:
            return
        self._first_s.observe(pace.first_s - pace.began_s)
        if pace.usage is not None and pace.usage.n_generated > 1 and pace.ended_s > pace.first_s:
            self._speed.observe((pace.usage.n_generated - 1) / (pace.ended_s - pace.first_s))

    def request_ended(self, endpoint: str, status: int) -> None:
        """Count a request of any kind."""
        self._requests.labels(endpoint, str(status)).inc()

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        return generate_latest(self._registry)


class Measure:
    """Middleware that counts requests by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE  # until something is sent

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note)
        except Exception:
            status = 500
            raise
        finally:
            self._metrics.request_ended(_endpoint_of(scope["path"]), status)


def _endpoint_of(path: str) -> str:
    """The route of a path, names in it left out: few labels, whatever clients send."""
    parts = path.split("/")
    if path.startswith("/v1/sessions/"):
        act = parts[4] if len(parts) == 5 and parts[4] in ("save", "resume", "fork", "pin", "unpin") else ""
        return f"/v1/sessions/{{name}}{act and '/'}{act}"
    if path.startswith("/v1/models/"):
        return "/v1/models/{name}"
    known = ("/", "/health", "/metrics", "/v1/live", "/v1/models", "/v1/sessions", "/v1/completions")
    return path if path in (*known, "/v1/chat/completions") else "other"


class _ServiceCollector(Collector):
    """The service's counts at the moment they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        counts = self._service.counts
        for name, told, field in _GAUGES:
            yield GaugeMetricFamily(f"llamakv_{name}", told, value=getattr(counts, field))
        yield GaugeMetricFamily("llamakv_cells_free", "Cells not in use", value=counts.n_cells_max - counts.n_cells)
        yield GaugeMetricFamily("llamakv_ready", "Whether requests are taken", value=float(self._service.is_ready))
        for name, told, field in _SUMS:
            yield CounterMetricFamily(f"llamakv_{name}", told, value=getattr(counts, field))
        reused = CounterMetricFamily(
            "llamakv_reused_tokens", "Tokens of prompts that were not read again", labels=("source",)
        )
        reused.add_metric(("memory",), counts.n_reused_memory)
        reused.add_metric(("store",), counts.n_reused_store)
        yield reused
        n_reused = counts.n_reused_memory + counts.n_reused_store
        yield GaugeMetricFamily(
            "llamakv_hit_ratio",
            "Tokens of prompts that were not read again, of all of them, since the start",
            value=n_reused / counts.n_prompt_tokens if counts.n_prompt_tokens else 0.0,
        )
