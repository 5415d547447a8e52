"""`ckdist bench`."""

from dataclasses import dataclass, fields
from typing import Any

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import integer_list, option
from ckdist.errors import ConfigError


def sizes(default: int, *flags: str, help: str, within: tuple[int, int] = (0, 1 << 24)) -> Any:
    """Returns a field for a list of whole numbers."""
    return option((default,), *flags, help=help, kind=int, parse=integer_list, within=within)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(EngineConfig):
    """`ckdist bench`: measure a model's prefill and decode, the engine's steps, or the machine itself."""

    target: str = option(
        "model", "target", choices=("model", "drafts", "steps", "machine", "comm"),
        help="thing to measure; drafts: decode without and with drafts (default with --spec or -md); steps: steps of "
        "the engine by their content, for ckdist simulate",
    )  # fmt: skip
    tune: bool = option(
        False,
        help="measure again and store for later runs; comm: the algorithm for each size; model: the prefill layout",
    )  # fmt: skip
    save: str | None = option(
        None, metavar="FILE.toml", help="machine: write the measured figures for `ckdist plan --machine FILE`"
    )
    n_prompt: tuple[int, ...] = sizes(512, "-p", "--n-prompt", help="prompt lengths, e.g. 512 or 128,512; 0: none")
    n_gen: tuple[int, ...] = sizes(128, "-n", "--n-gen", help="generated lengths, e.g. 128 or 32,128; 0: none")
    n_depth: tuple[int, ...] = sizes(
        0, "-d", "--n-depth", help="tokens of context before the measured ones, e.g. 0,8192"
    )
    n_parallel: tuple[int, ...] = sizes(
        1, "-npl", "--n-parallel", within=(1, 4096), help="sequences that are decoded together, e.g. 1,4,16"
    )
    sweep: str | None = option(
        None, choices=("threads", "context"),
        help="threads: prefill and decode by number of threads, and the fewest that suffice; context: both over a "
        "growing context up to --ctx-size, like llama.cpp's sweep-bench",
    )  # fmt: skip
    repetitions: int = option(5, "-r", within=(1, 10000), help="measurements per row")
    output: str = option("md", "-o", choices=("json", "md", "csv"), help="format of the rows")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target == "model" and (self.spec not in ("auto", "off") or self.model_draft is not None):
            object.__setattr__(self, "target", "drafts")
        if self.target == "drafts":
            self._check_drafts()
        if self.save is not None and self.target != "machine":
            raise ConfigError(
                f"--save writes a machine, but the target is {self.target}: use ckdist bench machine --save"
            )
        sized = [item for item in fields(self) if item.name in ("n_prompt", "n_gen", "n_depth", "n_parallel")]
        given = [item.metadata["flags"][-1] for item in sized if getattr(self, item.name) != item.default]
        if self.sweep is not None and self.target != "model":
            raise ConfigError(f"--sweep {self.sweep} measures a model: leave {self.target!r} out")
        if self.target == "steps" and given:
            raise ConfigError(
                f"steps are of sizes up to --ubatch-size, --parallel and --ctx-size: leave {given[0]} out"
            )
        if self.sweep == "context" and given:
            raise ConfigError(f"--sweep context feeds --ubatch-size tokens at a time: leave {given[0]} out")
        if self.sweep == "threads":
            for item in sized:
                if len(values := getattr(self, item.name)) > 1:
                    flag = item.metadata["flags"][-1]
                    raise ConfigError(f"--sweep threads takes one {flag}, not {len(values)}: use {flag} {values[0]}")
            if not all((*self.n_prompt, *self.n_gen)):
                raise ConfigError("--sweep threads measures prefill and decode: use --n-prompt and --n-gen above 0")
        if self.target == "model" and not any((*self.n_prompt, *self.n_gen)):
            raise ConfigError("--n-prompt 0 and --n-gen 0 leave nothing to measure: give one of them")

    def _check_drafts(self) -> None:
        if self.spec == "off":
            raise ConfigError(
                "--spec off leaves nothing to compare: use auto, ngram, suffix, or model with --model-draft"
            )
        if self.sweep is not None:
            raise ConfigError(f"--sweep {self.sweep} measures no drafts: leave it or --spec out")
        if not all(self.n_gen):
            raise ConfigError("drafts are measured in decode: use --n-gen above 0")

    @property
    def runs_model(self) -> bool:
        """False if the machine is measured."""
        return self.target in ("model", "drafts", "steps")
