"""ckdist: serve and train large language models on CPU servers."""

__version__ = "0.1.0"
