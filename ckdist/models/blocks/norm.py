"""The norm of rows that a model has everywhere."""

from dataclasses import dataclass

from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


@dataclass(frozen=True)
class RowNorm:
    """`kind` as in `ModelSpec.norm`."""

    kind: str
    eps: float

    def __call__(self, g: Tracer, x: Value, path: str) -> Value:
        """The norm whose weights' names begin with `path`. x: (rows, hidden)."""
        weight, hidden = g.weight(f"{path}.weight", x.dims[-1]), x.dims[-1]
        if self.kind == "rms":
            return g.rms_norm(x, weight, self.eps)
        bias = g.weight(f"{path}.bias", hidden) if self.kind == "layer_bias" else None
        return g.layer_norm(x, weight, bias, self.eps)
