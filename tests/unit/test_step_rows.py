"""Tokens of a step that fit the memory, and the rows of logits of larger steps."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ckdist import LLM
from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.layouts import step_rows
from ckdist.layouts.memory_sizes import WeightBytes

ROW = 100_000  # bytes


@pytest.mark.parametrize(("free", "tokens"), [(8 * 2048, 0), (8 * 2048 - 1, 1024), (8 * 1024 - 1, 512), (0, 512)])
def test_a_step_has_the_rows_that_fit_beside_the_weights(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, tokens: int
):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(step_rows, "free_memory", lambda *_: (free + 50) * ROW)
    spec: Any = SimpleNamespace(usual_ubatch=2048, reads_whole=False)
    steps: Any = [SimpleNamespace(arena_bytes=2048 * ROW, exchange_floats=0)]
    config, rows = step_rows.fitting_step(EngineConfig(), spec, SingleWorld(), WeightBytes(50 * ROW), steps)
    assert config.ubatch_size == tokens and rows == ((tokens or 2048) - 512) * ROW
    said = [f"steps have {tokens} tokens, not 2048", "-ub 2048"] if tokens else []
    assert [text in caplog.text for text in said] == [True] * len(said) and bool(caplog.text) == bool(said)


def test_a_larger_step_has_no_more_rows_of_logits():
    ids = [5 + i * 37 % 200 for i in range(520)]
    with LLM(threads=1, ctx_size=640, ubatch_size=640) as llm:
        assert llm.engine.executable.max_outputs == 512
        assert np.array_equal(llm.logits(ids)[:100], llm.logits(ids[:100]))
