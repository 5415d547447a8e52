"""ckdist: serve and train large language models on CPU servers.

>>> from ckdist import LLM, SamplingParams
>>> LLM("model.gguf", threads=2).generate(["def main("], SamplingParams(max_tokens=32, temperature=0))
"""

TYPE_CHECKING = False  # importing it from typing takes longer than all of this module
if TYPE_CHECKING:
    from ckdist import train
    from ckdist.engine.llm import LLM
    from ckdist.engine.sampling_params import SamplingParams
    from ckdist.train.config import TrainConfig

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "TrainConfig", "__version__", "train"]


def __getattr__(name: str) -> object:
    """Imports the engine at its first use, so that `ckdist --help` does not load it."""
    if name == "LLM":
        from ckdist.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from ckdist.engine.sampling_params import SamplingParams

        return SamplingParams
    if name == "train":
        import importlib

        return importlib.import_module("ckdist.train")
    if name == "TrainConfig":
        from ckdist.train.config import TrainConfig

        return TrainConfig
    raise AttributeError(f"module 'ckdist' has no attribute {name!r}")
