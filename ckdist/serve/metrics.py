"""What Prometheus can read: the HTTP process's own counts, the numbers that rank 0 sends with its status, and some of
both under the names that other servers' dashboards read.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ckdist.serve.dashboards import llama_families, vllm_families

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
)  # these win over rank 0's
MEANINGS = {  # of rank 0's numbers, which another version of it may have more of
    "blocks": "Blocks of the KV cache, of 16 tokens each",
    "blocks_cached": "Blocks that no sequence uses and that hold the beginning of an earlier prompt",
    "blocks_used": "Blocks that sequences use",
    "expert_busiest": "The expert of a layer that had the most rows",
    "expert_busiest_rows": "How many rows that expert had",
    "expert_dispatch_from": "Tokens in a step from which rows go to the hosts that have their experts; 0: never",
    "expert_dispatch_tokens_total": "Tokens of steps in which rows went to the hosts that have their experts",
    "expert_imbalance": "Rows of a layer's busiest expert over the mean of its experts",
    "expert_rows_total": "Rows that experts had, over all layers: a token takes several in each",
    "first_token_seconds": "From the arrival of a request at rank 0 to its first token",
    "preemptions_total": "Sequences that gave their blocks to others and were computed again later",
    "prefill_by_tensor_layer_bytes": "Bytes that a rank moves for one layer of a large prompt, dividing the matrices",
    "prefill_by_tensor_layer_seconds": "Measured time of one layer of a large prompt, dividing the matrices",
    "prefill_by_tensor_tokens_total": "Prompt tokens computed with ranks dividing the matrices",
    "prefill_by_token_from": "Tokens in a step from which ranks divide the tokens; 0: never",
    "prefill_by_token_layer_bytes": "Bytes that a rank moves for one layer of a large prompt, dividing the tokens",
    "prefill_by_token_layer_seconds": "Measured time of one layer of a large prompt, dividing the tokens",
    "prefill_by_token_tokens_total": "Prompt tokens computed with ranks dividing the tokens",
    "prefill_choice_info": "How ranks divide prompts, and why",
    "requests_running": "Sequences that are in the batch",
    "requests_waiting": "Sequences that wait for a place in the batch",
    "state_slots": "Places for the states of sequences, which layers with linear attention keep",
    "state_slots_used": "Places that running sequences use",
    "state_snapshots": "States that are kept for prompts that begin as earlier ones",
    "state_snapshots_saved_total": "States that were kept so",
    "step_decode_measured_seconds": "Of a late step without prompts, on rank 0",
    "step_decode_predicted_seconds": "What that step was predicted to take, as `ckdist plan` does",
    "step_prompt_measured_seconds": "Of a late step with prompts, on rank 0",
    "step_prompt_predicted_seconds": "What that step was predicted to take, as `ckdist plan` does",
    "step_seconds": "One step of the batch on all ranks",
    "weights_bytes": "Bytes of this rank's packed weights, when all are",
    "weights_packed_by_steps_bytes_total": "Bytes that steps packed and kept on the way",
    "weights_packed_bytes": "Bytes that are packed",
    "weights_packed_ratio": "Part of the weights that is packed",
}
STATES = ("loading", "ready", "draining", "failed", "stale")


class Metrics(Collector):
    """One registry; counters are fields, named for what they count."""

    def __init__(
        self, model: str, state: Callable[[], str], active: Callable[[], int], stats: Callable[[], dict[str, Any]]
    ):
        self.model, self._state, self._active, self._stats = model, state, active, stats
        registry = self.registry = CollectorRegistry()

        self.requests = Counter("ckdist_requests", "Answered HTTP requests", ["path", "status"], registry=registry)
        self.failed_keys = Counter("ckdist_failed_keys", "Requests with a wrong API key", registry=registry)
        self.aborts = Counter(
            "ckdist_aborted_requests", "Requests that ended before all their choices were complete", registry=registry
        )
        self.prompt_tokens = Counter(
            "ckdist_prompt_tokens", "Prompt tokens of requests that got an answer", registry=registry
        )
        self.cached_tokens = Counter(
            "ckdist_cached_tokens", "Prompt tokens found in the prefix cache", registry=registry
        )
        self.generated_tokens = Counter("ckdist_generated_tokens", "Generated tokens", registry=registry)
        self.first_token_seconds = Histogram(
            "ckdist_time_to_first_token_seconds",
            "From submit to the first token",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.token_seconds = Histogram(
            "ckdist_time_per_output_token_seconds",
            "Mean time between tokens of a request",
            buckets=TOKEN_SECONDS,
            registry=registry,
        )
        self.request_seconds = Histogram(
            "ckdist_request_seconds", "Whole time of a request", ["path"], buckets=WAIT_SECONDS, registry=registry
        )
        self.finished = Counter(
            "ckdist_finished_sequences", "Choices that came to their ends", ["reason"], registry=registry
        )
        self.generation_seconds = Histogram(
            "ckdist_generation_seconds",
            "From submit to the last token of a request",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.decode_seconds = Histogram(
            "ckdist_decode_seconds",
            "From the first token of a request to its last",
            buckets=WAIT_SECONDS,
            registry=registry,
        )
        self.inter_token_seconds = Histogram(
            "ckdist_inter_token_seconds", "Between two tokens of a choice", buckets=TOKEN_SECONDS, registry=registry
        )
        self.request_prompt_tokens = Histogram(
            "ckdist_request_prompt_tokens", "Prompt tokens of a request", buckets=TOKENS, registry=registry
        )
        self.request_generated_tokens = Histogram(
            "ckdist_request_generated_tokens", "Generated tokens of a request", buckets=TOKENS, registry=registry
        )
        self.registry.register(self)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing; the registry asks."""
        return []  # what rank 0 sends is not known beforehand

    def collect(self) -> Iterator[Metric]:
        """The numbers of this moment; called by the registry."""
        state = GaugeMetricFamily("ckdist_state", "1 for the state that the server is in", labels=["state"])
        for name in STATES:
            state.add_metric([name], float(name == self._state()))
        yield state
        yield GaugeMetricFamily("ckdist_active_sequences", "Sequences running and waiting", value=self._active())
        stats = self._stats()
        yield from _families(stats)
        yield from vllm_families(self, stats)
        yield from llama_families(self, stats)


def _families(stats: dict[str, Any]) -> Iterator[Metric]:
    """Rank 0's numbers: `X_total` counts, `X_le_BOUND` with `X_sum` and `X_count` are a histogram, others are gauges,
    `X.LABEL.VALUE` one with a label; and its texts, `X_info`.
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
        yield HistogramMetricFamily(
            f"ckdist_{base}", _meaning(base), buckets=counts, sum_value=numbers.pop(f"{base}_sum", 0)
        )
    for name, value in stats.items():
        if isinstance(value, str) and NAME.fullmatch(name) and name.endswith("_info"):
            yield InfoMetricFamily(
                f"ckdist_{name.removesuffix('_info')}", _meaning(name), value={"reason": value[:MAX_LABEL]}
            )
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
