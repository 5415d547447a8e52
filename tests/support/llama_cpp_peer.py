"""llama.cpp as a test's independent implementation, where its package is installed."""

from pathlib import Path
from typing import Any

import pytest


def load_peer(path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A `llama_cpp.Llama` of a GGUF file, on one thread. Skips the test where there is no llama_cpp.

    It keeps the weights as the file has them: repacked for AMX, version 0.3.36 ends with a segmentation fault.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def as_stored() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", as_stored)
    return llama_cpp.Llama(str(path), n_threads=1, verbose=False, **options)
