"""Metrics of the load of experts: a few numbers per layer, however many experts it has."""

import sys
from collections.abc import Mapping

import numpy as np


def expert_stats(rows: Mapping[int, np.ndarray]) -> dict[str, float | str]:
    """Statistics per layer; `NAME.layer.N` is a number of layer N.

    imbalance = rows of the busiest expert / mean rows per expert; 1 if the layer has had no rows.

    Args:
        rows: Layer -> rows of each expert, (experts,).
    """
    stats: dict[str, float | str] = {"expert_rows_total": int(sum(counts.sum() for counts in rows.values()))}
    for layer, counts in rows.items():
        busiest = int(counts.argmax())
        stats[f"expert_busiest.layer.{layer}"] = busiest
        stats[f"expert_busiest_rows.layer.{layer}"] = int(counts[busiest])
        stats[f"expert_imbalance.layer.{layer}"] = float(counts[busiest] / counts.mean()) if counts.any() else 1.0
    return stats if rows else {}


def dispatch_stats(from_tokens: int, tokens: int) -> dict[str, float | str]:
    """Statistics of sending rows to the hosts that have their experts.

    Args:
        from_tokens: Tokens from which on a step sends its rows. `sys.maxsize`: never.
        tokens: Tokens whose rows were sent so far.
    """
    start = 0 if from_tokens == sys.maxsize else from_tokens
    return {"expert_dispatch_from": start, "expert_dispatch_tokens_total": tokens}
