"""The norm of rows that all parts of a model use."""

from dataclasses import dataclass

from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


@dataclass(frozen=True)
class RowNorm:
    """A norm over rows. `kind` is that of `ModelSpec.norm`."""

    kind: str
    eps: float

    def __call__(self, g: Tracer, x: Value, path: str) -> Value:
        """Norms x, (rows, hidden). `path` is the prefix of the weights' names."""
        if self.kind == "unit":
            return g.rms_norm(x, None, self.eps)
        weight, hidden = g.weight(f"{path}.weight", x.dims[-1]), x.dims[-1]
        if self.kind == "rms":
            return g.rms_norm(x, weight, self.eps)
        bias = g.weight(f"{path}.bias", hidden) if self.kind == "layer_bias" else None
        return g.layer_norm(x, weight, bias, self.eps)
