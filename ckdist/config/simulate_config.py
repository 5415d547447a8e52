"""`ckdist simulate`."""

from dataclasses import dataclass, fields
from typing import Any

from ckdist.config.options import CommandSettings, changed, option
from ckdist.config.plan_config import PlanConfig
from ckdist.config.serve_config import ServeConfig
from ckdist.errors import ConfigError

LENGTHS_HELP = "e.g. 512, uniform:128:2048, exponential:300 (mean) or lognormal:400:0.8 (median, sigma)"


@dataclass(frozen=True, kw_only=True)
class SimulateConfig(CommandSettings):
    """`ckdist simulate`: serve requests in simulated time with the real scheduler, on any number of hosts."""

    steps: str | None = option(
        None, metavar="FILE.json",
        help="costs of steps, measured by `ckdist bench steps -o json`; -m and --machine predict them instead",
    )  # fmt: skip
    model: str | None = option(
        None, "-m", metavar="MODEL",
        help="predict the costs of a GGUF file, folder, config.json, or the name of a shape, e.g. kimi-k2",
    )  # fmt: skip
    machine: str | None = option(
        None, metavar="FILE|NAME",
        help="hosts: machine file (.toml), or a catalogue name, e.g. epyc-9755 (default: this machine)",
    )  # fmt: skip
    type: str | None = changed(PlanConfig, "type")
    hosts: int = option(1, within=(1, 100_000), help="total number of hosts")
    hosts_per_replica: int = option(1, within=(1, 100_000), help="hosts of one replica")
    router: str = option(
        "round-robin", choices=("round-robin", "random", "least"),
        help="choice of the replica for a request; least: the one with the fewest requests",
    )  # fmt: skip
    rate: float | None = option(
        None, within=(1e-6, 1e6), metavar="R", help="mean requests per second, random arrivals (Poisson)"
    )
    trace: str | None = option(
        None, metavar="FILE.csv",
        help="requests from a file: arrival (seconds), prompt, output, optionally prefix and prefix_tokens",
    )  # fmt: skip
    clients: int | None = option(
        None, within=(1, 10_000_000), help="number of clients; each sends its next request after it has its answer"
    )
    think: float = option(
        0.0, within=(0, 1e6), metavar="SECONDS", help="mean pause of a client between answer and request"
    )
    duration: float = option(3600.0, within=(1e-3, 1e9), metavar="SECONDS", help="time in which requests arrive")
    prompt_tokens: str = option(
        "512", metavar="LENGTHS", help=f"length of prompts without their prefix, {LENGTHS_HELP}"
    )
    output_tokens: str = option("128", metavar="LENGTHS", help=f"length of outputs, {LENGTHS_HELP}")
    prefix_tokens: int = option(0, within=(0, 1 << 24), help="length of a shared prefix of prompts")
    prefixes: int = option(1, within=(1, 1 << 24), help="number of different prefixes")
    ctx_size: int = option(8192, "-c", within=(16, 1 << 24), help="longest sequence in tokens")
    ubatch_size: int = option(512, "-ub", within=(1, 1 << 20), help="most tokens of a step")
    parallel: int = option(8, "-np", within=(1, 4096), help="most sequences at once")
    cache_tokens: int = option(
        0, within=(0, 1 << 31), help="positions of a replica's cache; 0: --parallel times --ctx-size"
    )
    max_queue: int = option(512, within=(0, 1 << 20), help="most waiting requests of a replica")
    max_step_ms: float = changed(ServeConfig, "max_step_ms")
    pipeline_parallel_size: int = option(
        1, "-pp", within=(1, 1024), help="pipeline stages of a replica, which share the cost of a step"
    )
    stage_hop: float = option(0.0, within=(0, 10), metavar="SECONDS", help="delay from one stage to the next")
    front_end: float = option(
        0.0, within=(0, 10), metavar="SECONDS",
        help="time per request outside the engine's steps: HTTP, and to the scheduler and back",
    )  # fmt: skip
    host_mtbf: float | None = option(
        None, within=(1e-3, 1e9), metavar="HOURS",
        help="mean time between failures of a host; its replica fails with it (default: no failures)",
    )  # fmt: skip
    restart: float = option(60.0, within=(0, 1e6), metavar="SECONDS", help="time until a failed replica serves again")
    first_token: float | None = option(
        None, within=(0, 1e6), metavar="SECONDS", help="goodput objective: most seconds to the first token"
    )
    per_token: float | None = option(
        None, within=(0, 1e6), metavar="SECONDS",
        help="goodput objective: most seconds per token, averaged over a request",
    )  # fmt: skip
    seed: int = option(0, within=(0, 1 << 62), help="seed of all random numbers")
    sample: int = option(0, within=(0, 100_000), help="simulate only N replicas and scale the result; 0: all")
    jobs: int = option(0, "-j", within=(0, 1024), help="processes; 0: one for each core")
    json: bool = option(False, help="print one JSON object")
    plot: str | None = option(None, metavar="FILE.svg", help="draw the waiting times (needs the plot extra)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) == (self.model is None):
            raise ConfigError(
                "the cost of steps must be measured or predicted: use either --steps FILE (ckdist bench steps -o json) "
                "or -m MODEL"
            )
        for flag in ("machine", "type"):
            if self.model is None and getattr(self, flag) is not None:
                raise ConfigError(
                    f"--{flag} is for predicted steps, and --steps has measured ones: leave one of them out"
                )
        self._check_load()
        if self.hosts % self.hosts_per_replica:
            raise ConfigError(f"--hosts {self.hosts} is not a multiple of --hosts-per-replica {self.hosts_per_replica}")
        if self.sample and self.router == "least":
            raise ConfigError("--sample leaves replicas out, and --router least compares all of them: leave one out")
        if self.cache_tokens and self.cache_tokens < self.ctx_size:
            raise ConfigError(f"--cache-tokens {self.cache_tokens} does not hold one sequence of {self.ctx_size}")

    def _check_load(self) -> None:
        """Raises ConfigError unless there is one kind of load, with only its own flags."""
        kinds = [flag for flag in ("rate", "trace", "clients") if getattr(self, flag) is not None]
        if len(kinds) != 1:
            found = " and ".join(f"--{kind}" for kind in kinds) + " set" if kinds else "no flag sets"
            raise ConfigError(f"{found} the load: use one of --rate, --trace and --clients")
        own: dict[str, tuple[str, ...]] = {
            "trace": ("prompt_tokens", "output_tokens", "prefix_tokens", "prefixes", "think"),
            "rate": ("think",),
            "clients": (),
        }
        defaults: dict[str, Any] = {item.name: item.default for item in fields(self)}
        for name in own[kinds[0]]:
            if getattr(self, name) != defaults[name]:
                raise ConfigError(f"--{name.replace('_', '-')} has no meaning with --{kinds[0]}: leave it out")
        if self.clients is not None and self.router != "round-robin":
            raise ConfigError(
                f"--clients stay with their replica, so --router {self.router} has no effect: leave it out"
            )
