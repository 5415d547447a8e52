"""The metrics of a server with several models: each model's own with the label `model`, and those of HTTP."""

from collections.abc import Iterable

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CollectorRegistry, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from ckdist.serve.metrics import Metrics
from ckdist.serve.model_router import ModelRouter

OF_HTTP = ("ckdist_requests", "ckdist_failed_keys", "ckdist_request_seconds")


class RouterMetrics(Collector):
    """Collects the metrics of all models.

    Attributes:
        http: Counters of HTTP requests, of all models together.
    """

    def __init__(self, router: ModelRouter) -> None:
        self._router = router
        self.http = Metrics("", lambda: "ready", lambda: router.active, dict)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def answer(self) -> Response:
        """Returns the metrics in the Prometheus text format."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def collect(self) -> Iterable[Metric]:
        """Returns the current numbers. The registry calls this."""
        families = {family.name: family for family in self.http.registry.collect() if family.name in OF_HTTP}
        for name, model in self._router.models.items():
            for family in model.service.metrics.registry.collect():
                if family.name in OF_HTTP:
                    continue
                joined = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                joined.samples += [
                    sample._replace(labels={**sample.labels, "model": name}) for sample in family.samples
                ]
        families |= {family.name: family for family in self._of_models()}
        return families.values()

    def _of_models(self) -> Iterable[Metric]:
        loaded = GaugeMetricFamily("ckdist_model_loaded", "1 if the model is loaded", labels=["model"])
        needs = GaugeMetricFamily("ckdist_model_bytes", "Bytes that a loaded model may take", labels=["model"])
        restarts = GaugeMetricFamily("ckdist_model_restarts", "Restarts after crashes", labels=["model"])
        resumed = GaugeMetricFamily("ckdist_resumed_requests", "Requests continued after crashes", labels=["model"])
        for name, model in self._router.models.items():
            loaded.add_metric([name], float(model.state == "loaded"))
            needs.add_metric([name], 0 if model.state == "unloaded" else model.needs or 0)
            restarts.add_metric([name], model.restarts)
            resumed.add_metric([name], model.client.resumed)
        return loaded, needs, restarts, resumed
