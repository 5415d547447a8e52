"""Gates cut at a number of standard deviations above their mean, so that few of them are not 0."""

from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def cut_gate(g: Tracer, gate: Value, deviations: float) -> Value:
    """gate: (tokens, ffn) -> max(gate - mean - deviations * std, 0)."""
    (sums,) = g.emit("column_sums", (gate,), names=["sums"])
    (gate,) = g.emit("cut_rows", (gate, g.reduce(sums)), names=["gate"], deviations=deviations)
    return gate
