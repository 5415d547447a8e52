"""How far an arena of weights is, and what loading it did."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """What `load` did: bytes wanted of the files, bytes that the arena holds, seconds."""

    source_bytes: int
    arena_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.source_bytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"loaded {self.source_bytes / 1e9:.2f} GB into {self.arena_bytes / 1e9:.2f} GB "
            f"in {self.seconds:.2f} s, {rate:.2f} GB/s"
        )


@dataclass(frozen=True)
class Filled:
    """How far an arena is: `bytes` packed in all, of which `ready`; `kept` were packed by this rank's steps, for its
    own arena or another rank's.

    `seconds`: since filling began, until it ended. `finished`: nothing is left, on any rank that this one reads.
    `copy_engine`: its name.
    """

    bytes: int
    ready: int
    kept: int
    seconds: float
    finished: bool
    copy_engine: str

    @property
    def fraction(self) -> float:
        """The part of the bytes that is ready, from 0 to 1."""
        return self.ready / self.bytes if self.bytes else 1.0

    def stats(self) -> dict[str, float]:
        """For metrics."""
        return {
            "weights_bytes": self.bytes,
            "weights_packed_bytes": self.ready,
            "weights_packed_ratio": self.fraction,
            "weights_packed_by_steps_bytes_total": self.kept,
        }

    def __str__(self) -> str:
        kept = f", {self.kept / 1e9:.2f} GB of it by steps" if self.kept else ""
        return f"weights are packed: {self.bytes / 1e9:.2f} GB in {self.seconds:.2f} s{kept}; by {self.copy_engine}"
