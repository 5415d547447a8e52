"""Prometheus metrics: the HTTP process's own counts, and the numbers in rank 0's status.

Some of them also have the names that other servers' dashboards read.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

WAIT_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
TOKENS = tuple(1 << power for power in range(18))
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
NAME = re.compile(r"[a-z][a-z0-9_.]{0,80}")
MAX_LABEL = 1000  # characters
LABELLED = re.compile(r"(\w+)\.([a-z]+)\.(\w+)")
BUCKET = re.compile(r"(\w+)_le_([0-9.]+)")
COUNTED_HERE = (
    "requests_total",
    "prompt_tokens_total",
    "cached_tokens_total",
    "generated_tokens_total",
)  # rank 0's numbers of these names are ignored
MEANINGS = {  # help texts of rank 0's numbers; a newer rank 0 may send more numbers
    "blocks": "Blocks of the KV cache, of 16 tokens each",
    "blocks_cached": "Blocks that no sequence uses and that hold the beginning of an earlier prompt",
    "blocks_used": "Blocks that sequences use",
    "disk_blocks": "Blocks of 16 tokens that are on disk",
    "disk_blocks_most": "Blocks that the disk cache can hold",
    "disk_damaged_total": "Loads that ended at a damaged or unreadable block, which was computed again",
    "disk_evicted_total": "Blocks and states that gave their place on disk to others",
    "disk_load_seconds_total": "Time that requests waited for loads from disk",
    "disk_loaded_bytes_total": "Bytes loaded from disk on all ranks",
    "disk_loaded_tokens_total": "Prompt tokens loaded from disk",
    "disk_loads_total": "Prefixes of prompts that were loaded from disk",
    "disk_requests_loading": "Sequences that wait for a load from disk",
    "disk_states": "States of sequences that are on disk",
    "disk_stored_blocks_total": "Blocks that were stored on disk",
    "disk_stored_bytes_total": "Bytes stored on disk on all ranks",
    "disk_write_errors_total": "Failed writes to the disk cache; after the first one nothing more is stored",
    "displaced_total": "Running sequences that gave their places to other clients or to urgent requests",
    "expert_busiest": "The expert of a layer that had the most rows",
    "expert_busiest_rows": "Rows of that expert",
    "expert_dispatch_from": "Smallest number of tokens in a step whose rows go to the hosts of their experts; 0: never",
    "expert_dispatch_tokens_total": "Tokens of steps in which rows went to the hosts of their experts",
    "expert_imbalance": "Rows of a layer's busiest expert over the mean of its experts",
    "expert_rows_total": "Rows of all experts in all layers; a token has several rows per layer",
    "draft_accepted_tokens_total": "Drafted tokens that were drawn",
    "draft_measured_gain": "Time without drafts as a multiple of the time of the steps with drafts, since the start",
    "draft_model_read_tokens_total": "Prompt tokens that the draft model computed",
    "draft_model_seconds_total": "Time of the draft model",
    "draft_model_tokens_total": "Tokens that the draft model drafted",
    "draft_predicted_gain": "The same as predicted before these steps",
    "draft_seconds_total": "Time of the steps with drafts, and of the draft model",
    "draft_steps_total": "Steps that verified drafted tokens",
    "draft_tokens_total": "Drafted tokens that steps verified",
    "first_token_seconds": "Time from the arrival of a request at rank 0 to its first token",
    "preemptions_total": "Sequences that gave their blocks to others and were computed again later",
    "prefill_by_tensor_tokens_total": "Prompt tokens computed with sharded matrices",
    "prefill_by_token_from": "Smallest number of tokens in a step that ranks shard by tokens; 0: never",
    "prefill_by_token_tokens_total": "Prompt tokens computed with sharded tokens",
    "prefill_choice_info": "How prompts are sharded over ranks, and why",
    "requests_running": "Sequences that are in the batch",
    "requests_waiting": "Sequences that wait for a place in the batch",
    "state_slots": "Slots for the states of sequences in layers with linear attention",
    "state_slots_used": "Slots that running sequences use",
    "state_snapshots": "States that are kept for later prompts with the same beginning",
    "state_snapshots_saved_total": "States that were saved for later prompts since the start",
    "step_seconds": "Time of one step of the batch on all ranks",
    "weights_bytes": "Bytes of this rank's weights once all are packed",
    "weights_packed_by_steps_bytes_total": "Bytes that steps packed and kept",
    "weights_packed_bytes": "Bytes of weights that are packed",
    "weights_packed_ratio": "Fraction of the weights that is packed",
}
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
STATES = ("loading", "ready", "draining", "failed", "stale")


class Metrics(Collector):
    """All metrics in one registry. The counters of this process are fields."""

    def __init__(
        self, model: str, state: Callable[[], str], active: Callable[[], int], stats: Callable[[], dict[str, Any]]
    ):
        self.model, self._state, self._active, self._stats = model, state, active, stats
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry, "namespace": "ckdist"}
        counter = functools.partial(Counter, **shared)
        waits = functools.partial(Histogram, buckets=WAIT_SECONDS, **shared)
        gaps = functools.partial(Histogram, buckets=TOKEN_SECONDS, **shared)
        tokens = functools.partial(Histogram, buckets=TOKENS, **shared)
        self.requests = counter("requests", "Answered HTTP requests", ["path", "status"])
        self.failed_keys = counter("failed_keys", "Requests with a wrong API key")
        self.aborts = counter("aborted_requests", "Requests that ended before all their choices were complete")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got an answer")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens found in the prefix cache")
        self.generated_tokens = counter("generated_tokens", "Generated tokens")
        self.first_token_seconds = waits("time_to_first_token_seconds", "Time from submit to the first token")
        self.token_seconds = gaps("time_per_output_token_seconds", "Mean time between tokens of a request")
        self.request_seconds = waits("request_seconds", "Time of a whole request", ["path"])
        self.finished = counter("finished_sequences", "Choices by how they ended", ["reason"])
        self.generation_seconds = waits("generation_seconds", "Time from submit to the last token of a request")
        self.decode_seconds = waits("decode_seconds", "Time from the first token of a request to its last")
        self.inter_token_seconds = gaps("inter_token_seconds", "Time between tokens of a choice")
        self.request_prompt_tokens = tokens("request_prompt_tokens", "Prompt tokens of a request")
        self.request_generated_tokens = tokens("request_generated_tokens", "Generated tokens of a request")
        self.registry.register(self)

    def render(self) -> bytes:
        """Returns the metrics in the Prometheus text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the current numbers. The registry calls this."""
        state = GaugeMetricFamily("ckdist_state", "1 for the current state of the server", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == self._state()))
        yield state
        yield GaugeMetricFamily("ckdist_active_sequences", "Sequences running and waiting", value=self._active())
        stats = self._stats()
        yield from _families(stats)
        yield from vllm_families(self, stats)
        yield from llama_families(self, stats)


def _families(stats: dict[str, Any]) -> Iterator[Metric]:
    """Yields rank 0's numbers as metrics.

    `X_total` is a counter; `X_le_BOUND`, `X_sum` and `X_count` are a histogram; `X.LABEL.VALUE` is a gauge with a
    label; `X_info` is a text. All others are gauges.
    """
    numbers = {
        name: value
        for name, value in stats.items()
        if type(value) in (int, float) and NAME.fullmatch(name) and name not in COUNTED_HERE
    }
    buckets: dict[str, list[tuple[str, float]]] = {}
    for match in [match for name in numbers if (match := BUCKET.fullmatch(name))]:
        base, bound = match.groups()
        buckets.setdefault(base, []).append((bound, numbers.pop(match[0])))
    for base, counts in buckets.items():
        counts.append(("+Inf", numbers.pop(f"{base}_count", counts[-1][1])))
        total = numbers.pop(f"{base}_sum", 0)
        yield HistogramMetricFamily(f"ckdist_{base}", _meaning(base), buckets=counts, sum_value=total)
    for name, value in stats.items():
        if isinstance(value, str) and NAME.fullmatch(name) and name.endswith("_info"):
            told = {"reason": value[:MAX_LABEL]}
            yield InfoMetricFamily(f"ckdist_{name.removesuffix('_info')}", _meaning(name), value=told)
    labelled: dict[tuple[str, str], GaugeMetricFamily] = {}
    for name, value in numbers.items():
        if match := LABELLED.fullmatch(name):
            base, label, of = match.groups()
            gauge = GaugeMetricFamily(f"ckdist_{base}", _meaning(base), labels=[label])
            labelled.setdefault((base, label), gauge).add_metric([of], value)
        elif name.endswith("_total"):
            yield CounterMetricFamily(f"ckdist_{name.removesuffix('_total')}", _meaning(name), value=value)
        elif "." not in name:
            yield GaugeMetricFamily(f"ckdist_{name}", _meaning(name), value=value)
    yield from labelled.values()


def _meaning(name: str) -> str:
    return MEANINGS.get(name, f"Rank 0's {name}")


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
