"""Sampling settings of the commands that generate text: `ckdist generate` and `ckdist chat`."""

from dataclasses import dataclass

from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import changed, option
from ckdist.config.samplers import SamplingFields


@dataclass(frozen=True, kw_only=True)
class SamplingConfig(SamplingFields, EngineConfig):
    """Settings of sampling, and of the end of the output. Some defaults are llama-cli's."""

    n_predict: int = option(128, "-n", within=(0, 1 << 24), help="most tokens to generate")
    temperature: float = changed(SamplingFields, "temperature", default=0.8)
    top_k: int = changed(SamplingFields, "top_k", default=40)
    top_p: float = changed(SamplingFields, "top_p", default=0.95)
    min_p: float = changed(SamplingFields, "min_p", default=0.05)
    stop: tuple[str, ...] = option((), repeat=True, metavar="TEXT", help="end before this text; may be repeated")
