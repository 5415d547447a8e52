"""How evenly experts are used, for metrics: a few numbers for each layer, whatever the number of experts."""

import sys
from collections.abc import Mapping

import numpy as np


def expert_stats(rows: Mapping[int, np.ndarray]) -> dict[str, float | str]:
    """Of how many rows each expert of a layer had, (experts,): `NAME.layer.N` is a number of layer N.

    The imbalance is the rows of the busiest expert over the mean; of a layer that no row has reached yet it is 1.
    """
    stats: dict[str, float | str] = {"expert_rows_total": int(sum(counts.sum() for counts in rows.values()))}
    for layer, counts in rows.items():
        busiest = int(counts.argmax())
        stats[f"expert_busiest.layer.{layer}"] = busiest
        stats[f"expert_busiest_rows.layer.{layer}"] = int(counts[busiest])
        stats[f"expert_imbalance.layer.{layer}"] = float(counts[busiest] / counts.mean()) if counts.any() else 1.0
    return stats if rows else {}


def dispatch_stats(from_tokens: int, tokens: int) -> dict[str, float | str]:
    """From how many tokens in a step on rows go to the hosts that have their experts (`sys.maxsize`: never), and of how
    many tokens they went so far.
    """
    start = 0 if from_tokens == sys.maxsize else from_tokens
    return {"expert_dispatch_from": start, "expert_dispatch_tokens_total": tokens}
