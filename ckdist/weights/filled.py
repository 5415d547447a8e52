"""Progress of packing an arena of weights."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Filled:
    """Progress of packing an arena."""

    bytes: int  # in total
    ready: int  # bytes packed so far
    kept: int  # bytes packed by this rank's steps, for its own arena or another rank's
    seconds: float  # from the start of packing to now, or to its end
    finished: bool  # on this rank and all ranks whose arenas it reads

    @property
    def fraction(self) -> float:
        """The ratio ready / bytes, from 0 to 1. 1 if there are no bytes."""
        return self.ready / self.bytes if self.bytes else 1.0

    def stats(self) -> dict[str, float]:
        """The values by the names of metrics."""
        return {
            "weights_bytes": self.bytes,
            "weights_packed_bytes": self.ready,
            "weights_packed_ratio": self.fraction,
            "weights_packed_by_steps_bytes_total": self.kept,
        }

    def __str__(self) -> str:
        kept = f", {self.kept / 1e9:.2f} GB of it by steps" if self.kept else ""
        return f"weights are packed: {self.bytes / 1e9:.2f} GB in {self.seconds:.2f} s{kept}"
