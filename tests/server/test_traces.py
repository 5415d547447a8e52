"""Traces: what a collector receives over HTTP, decoded by OpenTelemetry's own messages."""

import gzip
import http.server
import threading

import httpx
import pytest

from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError
from ckdist.serve.traces import check_traces, collector_url
from tests.support.served import serving, wait_for

messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Collector(http.server.ThreadingHTTPServer):
    """Keeps the spans that it receives."""

    daemon_threads = True

    def __init__(self):
        self.spans, self.resources = [], []
        super().__init__(("127.0.0.1", 0), Receiver)


class Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
        request = messages.ExportTraceServiceRequest.FromString(body)
        for part in request.resource_spans:
            self.server.resources.append({item.key: item.value.string_value for item in part.resource.attributes})
            self.server.spans += [span for scope in part.scope_spans for span in scope.spans]
        assert self.path == "/v1/traces"
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        """Nothing is printed."""


def test_a_collector_gets_a_span_for_each_request_with_its_prompt_and_answer(monkeypatch):
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with Collector() as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_address[1]}"
        with serving(otlp_traces_endpoint=endpoint) as (_, server):
            body = {"prompt": "secret words", "max_tokens": 4}
            headers = {"traceparent": PARENT, "x-request-id": "mine"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
            assert httpx.post(f"{server.url}/v1/completions", json={"prompt": 3.5}).status_code == 400
            wait_for(lambda: len(collector.spans) >= 4)
        collector.shutdown()
    first = [span for span in collector.spans if span.trace_id.hex() == PARENT[3:35]]
    spans = {span.name: span for span in first}
    request = spans["POST /v1/completions"]
    assert set(spans) == {"POST /v1/completions", "prompt", "answer"} and request.parent_span_id.hex() == PARENT[36:52]
    assert spans["prompt"].parent_span_id == spans["answer"].parent_span_id == request.span_id
    order = [request.start_time_unix_nano, spans["prompt"].start_time_unix_nano, spans["prompt"].end_time_unix_nano]
    order += [spans["answer"].start_time_unix_nano, spans["answer"].end_time_unix_nano, request.end_time_unix_nano]
    assert order == sorted(order)
    found = {item.key: item.value for item in request.attributes}
    assert found["gen_ai.usage.output_tokens"].int_value == 4 and found["ckdist.request_id"].string_value == "mine"
    assert found["gen_ai.request.model"].string_value == "bytes"
    assert b"secret" not in b"".join(span.SerializeToString() for span in collector.spans)
    assert collector.resources[0]["service.name"] == "ckdist"
    (refused,) = [span for span in collector.spans if span.trace_id.hex() != PARENT[3:35]]
    assert {item.key: item.value.int_value for item in refused.attributes}["http.response.status_code"] == 400


def test_a_collector_that_is_gone_delays_nobody():
    with serving(otlp_traces_endpoint="http://127.0.0.1:9") as (_, server):
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_addresses_of_collectors():
    assert collector_url("http://h:4318") == collector_url("http://h:4318/") == "http://h:4318/v1/traces"
    assert collector_url("https://h/otlp/traces?x=1") == "https://h/otlp/traces?x=1"
    for wrong in ("h:4317", "http://[", "http://h:x"):
        with pytest.raises(ConfigError, match=r"--otlp-traces-endpoint \(.*\) must be an address of OTLP over HTTP"):
            check_traces(wrong)
    assert ServeConfig().otlp_traces_endpoint is None
