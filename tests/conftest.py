"""What every test finds: a cache of this run's own beside the models that were fetched, and all CPUs that it began with."""

import os
import tempfile

import pytest

from ckdist.hub.store import FOLDER_VARIABLE, store_folder
from tests import levels


def pytest_configure(config) -> None:
    config.pluginmanager.register(levels)


@pytest.fixture(scope="session", autouse=True)
def cache():
    """A cache folder of this run, which child processes inherit."""
    os.environ.setdefault(FOLDER_VARIABLE, str(store_folder()))
    with tempfile.TemporaryDirectory(prefix="ckdist-cache-") as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        yield folder


@pytest.fixture(scope="module", autouse=True)
def cpus():
    """A rank that ran in this process has bound its thread, and what is started later would inherit that."""
    given = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, given)


def pytest_terminal_summary(terminalreporter) -> None:
    """One line for each published model that was not here, and so not tested."""
    reasons = {
        report.longrepr[2]
        for report in terminalreporter.stats.get("skipped", ())
        if "test_real_models" in report.nodeid and isinstance(report.longrepr, tuple)
    }
    for reason in sorted(reasons):
        terminalreporter.write_line(f"published models not tested: {reason.removeprefix('Skipped: ')}")
