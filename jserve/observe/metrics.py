"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jserve.address import Address
from jserve.engine.contract import Watched
from jserve.observe.server import MetricsServer
from jserve.request import FinishReason

__all__ = ["Metrics"]

SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0)
LONG_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Metrics:
    """What requests report, and what the engine says of itself at each scrape. Safe from any thread.

    Every metric is named ``jserve_...`` and labelled ``model_name``. Times are seconds.
    """

    def __init__(self, *, model_name: str, engine: Watched | None = None) -> None:
        """``engine`` is asked for its stats at each scrape; without one its metrics are absent."""
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", LONG_SECONDS, model_name
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time of one output token after the first: tokens that arrive together share the time since the last ones.",
            SHORT_SECONDS,
            model_name,
        )
        self._total = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its end.", LONG_SECONDS, model_name
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From a request's arrival to its first step.", LONG_SECONDS, model_name
        )
        finished = Counter(
            "jserve_request_success",
            "Choices that ended, by reason; all reasons count.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model_name, reason.value) for reason in FinishReason}
        if engine is not None:
            self.registry.register(_EngineCollector(engine, model_name))

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def inter_token(self, seconds: float, *, tokens: int) -> None:
        """``tokens`` tokens of a choice came together, ``seconds`` after the ones before."""
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def choice_finished(self, reason: FinishReason) -> None:
        self._finished[reason].inc()

    def request_finished(self, *, total: float, queue: float) -> None:
        self._total.observe(total)
        self._queue.observe(queue)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def serve(self, address: Address) -> MetricsServer:
        """Serve ``GET /metrics`` from a thread, on a TCP address; port 0 takes a free one. Close what it returns.

        Raises ConfigError where the address cannot be bound.
        """
        return MetricsServer(address, self.render)

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...], model_name: str) -> Histogram:
        histogram = Histogram(f"jserve_{name}", words, ["model_name"], buckets=buckets, registry=self.registry)
        return histogram.labels(model_name)


class _EngineCollector(Collector):
    """The engine's stats at the moment of the scrape."""

    def __init__(self, engine: Watched, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        # Nothing is asked of the engine when the collector is registered.
        return []

    def collect(self) -> Iterator[Metric]:
        stats, limits = self._engine.stats(), self._engine.limits
        usage = stats.pages_in_use / limits.num_pages if limits.num_pages else 0.0
        gauges = {
            "num_requests_waiting": ("Choices accepted and not yet running.", stats.waiting),
            "num_requests_running": ("Choices that are running.", stats.running),
            "kv_cache_usage_ratio": ("Share of the KV cache's pages in use, 0 to 1.", usage),
            "kv_cache_pages_in_use": ("Pages of the KV cache in use.", stats.pages_in_use),
            "kv_cache_pages_free": ("Pages of the KV cache that are free.", stats.pages_free),
            "engine_ready": ("1 while the engine takes requests.", float(stats.ready)),
        }
        counters = {
            "prompt_tokens": ("Prompt tokens computed.", stats.prompt_tokens),
            "generation_tokens": ("Output tokens made.", stats.output_tokens),
            "num_preemptions": ("Choices that lost their pages and were computed again.", stats.preemptions),
            "dispatches": ("Device calls.", stats.dispatches),
            "compilations": ("Compilations after the engine was ready; 0 is right.", stats.compilations),
        }
        for name, (words, value) in gauges.items():
            gauge = GaugeMetricFamily(f"jserve_{name}", words, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        for name, (words, value) in counters.items():
            counter = CounterMetricFamily(f"jserve_{name}", words, labels=["model_name"])
            counter.add_metric([self._model_name], value)
            yield counter
