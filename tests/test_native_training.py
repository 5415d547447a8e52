"""The native replay of training against golden gradients of PyTorch, and against itself: other threads, ranks and cuts."""

from dataclasses import replace

import numpy as np
import pytest

from ckdist.comm.communicator import open_communicator
from ckdist.errors import ConfigError
from ckdist.layout import DATA, Mesh
from ckdist.models.decoder import loss as loss_of
from ckdist.program.autodiff import backward
from ckdist.program.interpreter import Interpreter
from ckdist.program.tracer import trace_loss
from ckdist.train.batch import PackedBatch
from ckdist.train.executable import TrainingExecutable
from tests.golden_training import FAMILIES, batches, cut, golden, gradient_errors, model
from tests.test_layout import spec as small_spec
from tests.thread_ranks import run_threads

TOKENS = 300


def executable(family: str, **more) -> TrainingExecutable:
    spec, weights = model(family)
    return TrainingExecutable(spec, TOKENS, weights.__getitem__, **more)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_is_exact(family):
    e, expected = executable(family, threads=2), golden(family)
    assert e.forward_backward(batches()[0]) == pytest.approx(expected["loss"].reshape(-1)[0], rel=1e-5)
    assert max(gradient_errors(expected, e.gradients).values()) < 1e-5
    e.close()
