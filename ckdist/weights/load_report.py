"""The report of packing an arena before anything runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadReport:
    """The result of `ShardLoader.load`."""

    source_bytes: int  # read from the files
    arena_bytes: int
    seconds: float

    def __str__(self) -> str:
        rate = self.source_bytes / 1e9 / max(self.seconds, 1e-9)
        return (
            f"loaded {self.source_bytes / 1e9:.2f} GB into {self.arena_bytes / 1e9:.2f} GB "
            f"in {self.seconds:.2f} s, {rate:.2f} GB/s"
        )
