"""What every test of ranks finds: a short measurement of the transport between hosts."""

import pytest

from ckdist.comm.transports import transport_choice


@pytest.fixture(scope="session", autouse=True)
def exchanges():
    """Each job over hosts measures exchanges. One of each size is enough: no result depends on their seconds."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("FEW", "LARGE"):
            patch.setattr(transport_choice, name, (getattr(transport_choice, name)[0], 1))
        yield
