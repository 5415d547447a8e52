"""Fixtures of all tests of ranks: they shorten measurements of the transport between hosts and of arithmetic, and open
golden models once.
"""

import functools
import pathlib
import threading

import pytest

from ckdist.comm.transports import transport_choice
from ckdist.engine import load_model
from ckdist.hub.bundled import BUNDLED
from ckdist.train import trainer
from tests.support.paths import GOLDEN


@pytest.fixture(scope="package", autouse=True)
def exchanges():
    """Each job over hosts measures exchanges. One of each size is enough: no result depends on their seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEW", "LARGE"):
            patch.setattr(transport_choice, name, (getattr(transport_choice, name)[0], 1))
        yield


@pytest.fixture(scope="package", autouse=True)
def arithmetic():
    """Each rank of a training measures the rate of its threads, which only figures of a log use. Once is enough."""
    measured = functools.cache(functools.partial(trainer.arithmetic_rate, cpus=()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "arithmetic_rate", lambda threads, cpus, form: measured(threads, form=form))
        yield


@pytest.fixture(scope="package", autouse=True)
def checkpoints():
    """Ranks are threads here, and each rank of each job opens its model. Golden models and the bundled one do not
    change.
    """
    opened, lock = functools.cache(load_model.open_checkpoint), threading.Lock()

    def open_checkpoint(path, overrides=None):
        if overrides or not {GOLDEN, BUNDLED} & {pathlib.Path(path), *pathlib.Path(path).parents}:
            return opened.__wrapped__(path, overrides)
        with lock:
            return opened(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_model, "open_checkpoint", open_checkpoint)
        yield
