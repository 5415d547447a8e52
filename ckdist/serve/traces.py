"""Traces of requests, sent to an OpenTelemetry collector: a span for each request, with one for its prompt and one for
its answer. Names follow OpenTelemetry's conventions for generative AI. Texts are never sent.
"""

import importlib.util
import logging
import time
import urllib.parse
from typing import Any

from ckdist import __version__
from ckdist.errors import ConfigError
from ckdist.serve.request_log import PROBES, Request

PATH = "/v1/traces"  # OTLP over HTTP
END_MILLISECONDS = 2000


class Traces:
    """Sends spans in a thread of OpenTelemetry's package. It drops spans if the collector is slow, and logs that."""

    def __init__(self, endpoint: str, model: str):
        """`endpoint` is the collector's address, such as http://127.0.0.1:4318."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        resource = Resource.create({"service.name": "ckdist", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(collector_url(endpoint), timeout=5)))
        self._tracer = self._provider.get_tracer("ckdist", __version__)
        self.model = model

    def add(self, request: Request, status: int) -> None:
        """Records a request that has ended. Its trace is that of the client's `traceparent`, if it sent one."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        if request.path in PROBES:
            return
        parent = TraceContextTextMapPropagator().extract({"traceparent": request.traceparent})
        now, clock = time.time_ns(), time.monotonic()
        moment = lambda seconds: now - int((clock - seconds) * 1e9)
        span = self._tracer.start_span(
            f"{request.method} {request.path[:200]}",
            parent,
            kind=SpanKind.SERVER,
            attributes=self._attributes(request, status),
            start_time=moment(request.begun),
        )
        if status >= 500:
            told = None if request.problem is None else request.problem.message[:200]
            span.set_status(Status(StatusCode.ERROR, told))
        moments = () if request.run is None else request.run.moments()
        inside = set_span_in_context(span)
        for name, begin, end in zip(("prompt", "answer"), moments, moments[1:], strict=False):
            self._tracer.start_span(name, inside, start_time=moment(begin)).end(moment(end))
        span.end(now)

    def close(self) -> None:
        """Sends the remaining spans, for at most END_MILLISECONDS."""
        self._provider.force_flush(END_MILLISECONDS)
        self._provider.shutdown()

    def _attributes(self, request: Request, status: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "http.request.method": request.method,
            "url.path": request.path[:200],
            "http.response.status_code": status,
            "ckdist.request_id": request.id,
        }
        if request.run is None:
            return found
        fields = request.run.log_fields()
        named = {
            "gen_ai.usage.input_tokens": fields.get("prompt_tokens"),
            "gen_ai.usage.output_tokens": fields.get("generated_tokens"),
            "gen_ai.server.time_to_first_token": fields.get("first_token_seconds"),
            "ckdist.cached_tokens": fields.get("cached_tokens"),
        }
        found |= {name: value for name, value in named.items() if value is not None}
        found |= {"gen_ai.system": "ckdist", "gen_ai.request.model": self.model, "gen_ai.response.model": self.model}
        if "finish" in fields:
            found["gen_ai.response.finish_reasons"] = str(fields["finish"]).split(",")
        return found


def collector_url(endpoint: str) -> str:
    """Returns the URL for spans: `endpoint`, with OTLP's own path if it has none."""
    parts = urllib.parse.urlsplit(endpoint)
    return urllib.parse.urlunsplit(parts if parts.path.strip("/") else parts._replace(path=PATH))


def check_traces(endpoint: str) -> None:
    """Raises ConfigError if the package is missing, or the address is none of HTTP."""
    flag = "--otlp-traces-endpoint"
    try:
        parts = urllib.parse.urlsplit(endpoint)
        is_http = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # a bracket is missing, or the port is no number up to 65535
        is_http = False
    if not is_http:
        raise ConfigError(f"{flag} ({endpoint}) must be an address of OTLP over HTTP, e.g. http://127.0.0.1:4318")
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError(f"{flag} needs OpenTelemetry's packages: pip install 'ckdist[otel]'")
