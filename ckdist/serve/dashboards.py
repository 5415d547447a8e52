"""The metrics under the names, types, labels and units that dashboards for vLLM and llama-server read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from ckdist.serve.metrics import Metrics

# vLLM's name -> field of Metrics
VLLM = {
    "vllm:prompt_tokens": "prompt_tokens",
    "vllm:generation_tokens": "generated_tokens",
    "vllm:prefix_cache_queries": "prompt_tokens",
    "vllm:prefix_cache_hits": "cached_tokens",
    "vllm:time_to_first_token_seconds": "first_token_seconds",
    "vllm:time_per_output_token_seconds": "inter_token_seconds",
    "vllm:inter_token_latency_seconds": "inter_token_seconds",
    "vllm:request_time_per_output_token_seconds": "token_seconds",
    "vllm:e2e_request_latency_seconds": "generation_seconds",
    "vllm:request_decode_time_seconds": "decode_seconds",
    "vllm:request_prompt_tokens": "request_prompt_tokens",
    "vllm:request_generation_tokens": "request_generated_tokens",
}
COUNTER, GAUGE = CounterMetricFamily, GaugeMetricFamily
REASONS = ("stop", "length", "abort")


def vllm_families(metrics: Metrics, stats: dict[str, Any]) -> Iterator[Metric]:
    """Yields vLLM's metrics. `stats` are rank 0's numbers. Every sample has the labels model_name and engine."""
    labels = {"model_name": metrics.model, "engine": "0"}
    for name, own in VLLM.items():
        yield _renamed(getattr(metrics, own), name, labels)
    finished = {sample.labels["reason"]: sample.value for sample in _samples(metrics.finished, "_total")}
    success = CounterMetricFamily(
        "vllm:request_success", "Requests by how they ended", labels=[*labels, "finished_reason"]
    )
    for reason in REASONS:
        success.add_metric([*labels.values(), reason], finished.get(reason, 0.0))
    yield success
    yield _family("vllm:num_preemptions", "Preempted sequences", _number(stats, "preemptions_total"), COUNTER, labels)
    for name, text, value in (
        ("num_requests_running", "Sequences in the batch", _number(stats, "requests_running")),
        ("num_requests_waiting", "Sequences in the queue", _number(stats, "requests_waiting")),
        ("kv_cache_usage_perc", "Share of the KV cache in use; 1 is all", _cache_usage(stats)),
        ("gpu_cache_usage_perc", "The former name of kv_cache_usage_perc", _cache_usage(stats)),
    ):
        yield _family(f"vllm:{name}", text, value, GAUGE, labels)


def llama_families(metrics: Metrics, stats: dict[str, Any]) -> Iterator[Metric]:
    """Yields llama-server's metrics, which have no labels."""
    counters = (metrics.prompt_tokens, metrics.generated_tokens, metrics.cached_tokens)
    prompt_tokens, tokens, cached = (_samples(own, "_total")[0].value for own in counters)
    times = (metrics.first_token_seconds, metrics.decode_seconds)
    prompt_seconds, seconds = (_samples(own, "_sum")[0].value for own in times)
    computed = prompt_tokens - cached
    waiting, running = (_number(stats, f"requests_{state}") for state in ("waiting", "running"))
    for name, text, value, kind in (
        ("prompt_tokens", "Prompt tokens computed", computed, COUNTER),
        ("prompt_seconds", "Time spent on prompts, waiting included", prompt_seconds, COUNTER),
        ("tokens_predicted", "Generated tokens", tokens, COUNTER),
        ("tokens_predicted_seconds", "Time spent on generation", seconds, COUNTER),
        ("n_decode", "Steps of the engine", _number(stats, "step_seconds_count"), COUNTER),
        (
            "prompt_tokens_seconds",
            "Mean prompt tokens per second of a request",
            _ratio(computed, prompt_seconds),
            GAUGE,
        ),
        ("predicted_tokens_seconds", "Mean generated tokens per second of a request", _ratio(tokens, seconds), GAUGE),
        ("requests_processing", "Sequences in the batch", running, GAUGE),
        ("requests_deferred", "Sequences in the queue", waiting, GAUGE),
        ("kv_cache_usage_ratio", "Share of the KV cache in use; 1 is all", _cache_usage(stats), GAUGE),
    ):
        yield _family(f"llamacpp:{name}", text, value, kind)


def _renamed(own: MetricWrapperBase, name: str, labels: dict[str, str]) -> Metric:
    (family,) = own.collect()
    copy = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            copy.add_sample(name + sample.name.removeprefix(family.name), {**labels, **sample.labels}, sample.value)
    return copy


def _samples(own: MetricWrapperBase, suffix: str) -> list[Sample]:
    return [sample for family in own.collect() for sample in family.samples if sample.name.endswith(suffix)]


def _family(
    name: str,
    text: str,
    value: float,
    kind: type[CounterMetricFamily | GaugeMetricFamily],
    labels: Mapping[str, str] = {},
) -> Metric:
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _number(stats: dict[str, Any], name: str) -> float:
    value = stats.get(name, 0)
    return float(value) if type(value) in (int, float) else 0.0


def _cache_usage(stats: dict[str, Any]) -> float:
    return _ratio(_number(stats, "blocks_used"), _number(stats, "blocks"))


def _ratio(amount: float, whole: float) -> float:
    return amount / whole if whole else 0.0
