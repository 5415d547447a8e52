"""Rows that ranks gather if tokens are sharded."""

import numpy as np
import pytest

from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import EMBEDDING, final_norm, head, table
from ckdist.program.tracer import trace
from tests.ranks.test_sparse_attention import MODEL, attend, logits_of
from tests.support.interpreter import Interpreter
from tests.support.programs.replay import build
from tests.support.situations import driven
from tests.support.specs import weights_of
from tests.support.thread_ranks import run_threads


def forward(g, ids, s):
    """A layer whose output has no residual: its linear is gathered itself."""
    x = g.reduce(g.embed(ids, table(g, s, EMBEDDING)))
    o, heads = attend(g, g.rms_norm(x, g.weight("norm", x.dims[-1]), 1e-6), 0, None)
    x = g.reduce(g.linear(g.select_rows(o), g.weight("o", x.dims[-1], heads), names=["attn"]))
    return g.gather(g.linear(final_norm(g, g.gather(x), s), head(g, s), names=["logits"]))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_linear_without_a_residual_is_gathered(ranks):
    program = trace(forward, MODEL, SINGLE, Mesh())
    weights = {name: array + ("norm" in name) for name, array in weights_of(program).items()}
    expected = Interpreter(program, MODEL, Mesh(), weights.get, np.float64).run(np.arange(172) * 7 % 100)

    def rank(world):
        *_, executable, _keep = build(world, MODEL, "auto", 2, 64, 16, "f32", weights=weights, forward=forward)
        executable.prefill_from = 0
        result = driven(world, executable, logits_of)
        executable.close()
        return result

    found = run_threads(ranks, rank)[0]
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()
