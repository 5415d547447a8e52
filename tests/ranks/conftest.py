"""What every test of ranks finds: a short measurement of the transport between hosts, and golden models that are
opened once.
"""

import functools
import pathlib
import threading

import pytest

from ckdist.comm.transports import transport_choice
from ckdist.engine import load_model
from ckdist.hub.bundled import BUNDLED
from tests.support.paths import GOLDEN


@pytest.fixture(scope="session", autouse=True)
def exchanges():
    """Each job over hosts measures exchanges. One of each size is enough: no result depends on their seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEW", "LARGE"):
            patch.setattr(transport_choice, name, (getattr(transport_choice, name)[0], 1))
        yield


@pytest.fixture(scope="session", autouse=True)
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
