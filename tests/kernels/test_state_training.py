"""Training of layers with states (linear attention, Mamba-2, short convolutions) against PyTorch's golden gradients,
and against the definition in float64.
"""

import numpy as np
import pytest

from ckdist.layout import DATA
from ckdist.mesh import Mesh
from ckdist.models.training_loss import loss as loss_of
from ckdist.program.pool import ThreadPool
from ckdist.program.training_tracer import trace_loss
from tests.kernels.test_native_training import random_batch, reference
from tests.support.golden_training import STATES, batches, golden, gradient_errors, model
from tests.support.specs import LINEAR
from tests.support.specs import spec as small_spec
from tests.support.training_executable import executable


@pytest.mark.parametrize("family", STATES)
def test_golden_models(family):
    """In float32. Rounding to bfloat16 changes the gradients of these small models by up to their own size."""
    spec, weights = model(family)
    batch, expected = batches(spec.vocab_size)[0], golden(family)
    e = executable(spec, len(batch.token_ids), weights.__getitem__, pool=ThreadPool(2), recompute=family == "bamba")
    assert e.forward_backward(batch) == pytest.approx(float(expected["loss"]), rel=1e-6)
    found = gradient_errors(expected, dict(e.gradients))
    assert max(found.values()) < STATES[family], found
    e.close()


@pytest.mark.parametrize("piece", ["gated_delta_net", "kimi_delta_attention", "mamba2", "gated_conv", "tiled_heads"])
def test_odd_widths(piece):
    """Chunks of tokens that end in the middle of a sequence, and heads that are no multiple of a vector."""
    more = {**LINEAR[piece], "layer": {}} if piece == "mamba2" else LINEAR[piece]
    spec, rng = small_spec(**more), np.random.default_rng(3)
    program = trace_loss(loss_of, spec, DATA, Mesh({"dp": 1}))
    weights = {w.name: 0.2 * rng.standard_normal([d.elements for d in w.dims]) for w in program.weights}
    batch = random_batch([33, 1, 70], spec.vocab_size)
    loss, expected = reference(spec, weights, batch)
    for threads, dtype, error in ((1, "float32", 2e-5), (3, "float32", 2e-5), (2, "bfloat16", 0.1)):
        e = executable(spec, len(batch.token_ids), weights.__getitem__, dtype=dtype, pool=ThreadPool(threads))
        assert e.forward_backward(batch) == pytest.approx(loss, rel=2e-3 if dtype == "bfloat16" else 1e-6)
        floor = 0.05 * max(np.linalg.norm(g) for g in expected.values())
        found = {n: np.linalg.norm(e.gradients[n] - g) / max(np.linalg.norm(g), floor) for n, g in expected.items()}
        assert max(found.values()) < error, (threads, dtype, found)
        e.close()
