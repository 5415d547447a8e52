"""`ckdist simulate-training`."""

from dataclasses import dataclass

from ckdist.config.options import CommandSettings, byte_size, option
from ckdist.config.plan_config import MACHINE_HELP
from ckdist.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class SimulateTrainingConfig(CommandSettings):
    """`ckdist simulate-training`: simulate a training step over many hosts, and weeks of failures and checkpoints."""

    model: str | None = option(
        None, "-m", metavar="MODEL", help="GGUF file, folder, config.json, or the name of a shape, e.g. kimi-k2"
    )
    machine: str = option("this", metavar="FILE|NAME", help=MACHINE_HELP)
    data_parallel_size: int = option(1, "-dp", within=(1, 1 << 16), help="replicas")
    tensor_parallel_size: int = option(1, "-tp", within=(1, 1 << 10), help="hosts that shard each layer")
    pipeline_parallel_size: int = option(1, "-pp", within=(1, 1 << 10), help="pipeline stages")
    expert_parallel_size: int = option(
        1, "-ep", within=(1, 1 << 16), help="only 1: `ckdist train` has every expert on every replica"
    )
    batches: int = option(
        0, within=(0, 1 << 12), help="batches of each replica in a step, one after the other; 0: four per stage"
    )
    batch_tokens: int = option(4096, within=(1, 1 << 24), help="tokens of a batch")
    sequence_tokens: int = option(4096, within=(1, 1 << 24), help="tokens of a sequence")
    spread: float = option(
        0.0, within=(0, 2), metavar="SIGMA",
        help="standard deviation of the logarithm of a pass's seconds, from hosts that are sometimes slower",
    )  # fmt: skip
    disk_rate: int = option(
        1 << 30, parse=byte_size, within=(1 << 10, 1 << 50), metavar="SIZE",
        help="bytes per second that a host writes to the checkpoint storage",
    )  # fmt: skip
    host_mtbf: float | None = option(
        None, within=(1e-3, 1e9), metavar="HOURS",
        help="mean time between failures of a host; the job fails with it (default: no failures)",
    )  # fmt: skip
    restart: float = option(600.0, within=(0, 1e6), metavar="SECONDS", help="time from a failure to the next step")
    checkpoint_interval: float | None = option(
        None, within=(1, 1e9), metavar="SECONDS",
        help="work between two checkpoints (default: the optimum by Young's formula)",
    )  # fmt: skip
    days: float = option(30.0, within=(1e-3, 1e5), metavar="DAYS", help="length of the training")
    seed: int = option(0, within=(0, 1 << 62), help="seed of all random numbers")
    json: bool = option(False, help="print one JSON object")
    plot: str | None = option(None, metavar="FILE.svg", help="draw the seconds of a step, the memory and the weeks")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model:
            raise ConfigError(
                "which model? ckdist simulate-training -m MODEL, a config.json, or the name of a shape, e.g. kimi-k2"
            )
        if self.expert_parallel_size > 1:
            raise ConfigError(
                f"--expert-parallel-size ({self.expert_parallel_size}) must be 1: `ckdist train` divides batches, "
                "layers and tensors over hosts, and has every expert on every replica"
            )
        if self.checkpoint_interval is not None and self.host_mtbf is None:
            raise ConfigError("--checkpoint-interval has no meaning without failures: use --host-mtbf, or leave it out")
