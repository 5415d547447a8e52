"""`ckdist generate`."""

from dataclasses import dataclass

from ckdist.config.options import option
from ckdist.config.sampling_config import SamplingConfig


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(SamplingConfig):
    """`ckdist generate`: continue one prompt on the terminal."""

    prompt: str = option("", "-p", metavar="TEXT", help="text to continue")
    json: bool = option(False, help="print one JSON object")
