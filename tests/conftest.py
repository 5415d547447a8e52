"""What every test finds: a cache of this run's own beside the models that were fetched, and all CPUs that it began
with.

At the end of a run stand the seconds of each room, and what was skipped and why. Under pytest-xdist the run's first
process alone writes the summary, and all workers share its cache: what a start measures once need not be measured by
each of them.
"""

import collections
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import pathlib
import shutil
import signal
import ssl
import tempfile

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from ckdist.comm import communicator
from ckdist.hub.store import FOLDER_VARIABLE, store_folder
from ckdist.layouts import rank_plan
from ckdist.program import pool
from ckdist.topology import arithmetic as topology_arithmetic
from ckdist.topology import bandwidth
from ckdist.train import report as training_report
from tests.support import launcher
from tests.support.paths import ROOT
from tests.support.stubs import stubs
from tests.support.warm_starts import cold_starts, warm_starts

# Files with tests of 15 s and more.
LONGEST = ("test_under_mpirun.py", "test_link_down.py", "test_layout.py", "test_ray.py", "test_packet_sizes.py")
POLLS = 50  # of a flag before a thread sleeps
MANY_DESCRIPTORS = 150
ARITHMETIC_SECONDS = 0.002  # of a measurement
READ_BYTES = 16 << 20  # of a measurement, for each thread
SHOWN_SECONDS = 0.01  # a setup that took less is in no summary
PR_SET_THP_DISABLE = 41
MPIRUN_SESSIONS = "PRTE_MCA_prte_tmpdir_base"  # where each mpirun makes a folder, named by its process number


def pytest_configure(config) -> None:
    """A cache folder of this run and one for the sessions of mpirun, which child processes inherit, workers among
    them.
    """
    gc.disable()  # until all tests are collected
    # A shell starts its background jobs with SIGINT ignored. Children inherit that, and would not end by it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "CKDIST_SAME_CASES" in os.environ:  # Hypothesis draws the same cases in each run
        hypothesis.settings.register_profile("same", derandomize=True, print_blob=True)
        hypothesis.settings.load_profile("same")
        providers._get_local_constants = providers.Constants  # else those of all modules that this worker has imported
    if hasattr(config, "workerinput"):
        return
    # Children inherit it. Arenas of small models are a few pages, and a huge page of zeros for each costs a twelfth of
    # the time of ranks.
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
    os.environ.setdefault(FOLDER_VARIABLE, str(store_folder()))
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's idle threads would poll on cores that tests use
    for variable, prefix in (("XDG_CACHE_HOME", "ckdist-cache-"), (MPIRUN_SESSIONS, "ckdist-mpi-")):
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
        os.environ[variable] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart(session) -> None:
    """A worker sends only reports that tell something: of calls, and of setups that failed or took time. The others
    are four of five messages.
    """
    for plugin in session.config.pluginmanager.get_plugins():
        if type(plugin).__name__ == "WorkerInteractor":
            plugin.sendevent = functools.partial(send_if_telling, plugin.sendevent)


def send_if_telling(send, name: str, **fields) -> None:
    report = fields.get("data", {}) if name == "testreport" else {}
    is_empty = report.get("when", "call") != "call" and report["outcome"] == "passed"
    if name not in ("logstart", "logfinish") and not (is_empty and report["duration"] < SHOWN_SECONDS):
        send(name, **fields)


@pytest.fixture(scope="session", autouse=True)
def certificates():
    """Each client of httpx, so each `httpx.get`, reads all certificates, 23 ms of CPU; tests that wait for a server ask
    a hundred times. Once is enough.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session", autouse=True)
def polls():
    """Workers share the CPUs, and ranks in this process take more than this host has: those of pretended hosts count
    the CPUs of each. A thread that polls for long holds up the one that it waits for.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_plan, "SPINS", POLLS)
        patch.setattr(pool, "SPINS", POLLS)
        patch.setattr(communicator, "_PATIENT_POLLS", POLLS)
        yield


@pytest.fixture(scope="session", autouse=True)
def measurements():
    """Each training measures the CPU's arithmetic, and each bench its memory, too. A fifteenth is enough: only figures
    of a log or of a row use it.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topology_arithmetic, "ARITHMETIC_SECONDS", ARITHMETIC_SECONDS)
        patch.setattr(bandwidth, "READ_BYTES", READ_BYTES)
        yield


@pytest.fixture(scope="session", autouse=True)
def caches():
    """Models in this process promise themselves little memory: they live long, and other workers need memory, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_plan, "KV_TOKENS", 1 << 14)
        yield


@pytest.fixture(scope="session", autouse=True)
def pictures():
    """Trainings in this process draw no picture of their loss, as without matplotlib: it takes longer than they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_report, "new_figure", no_figure)
        yield


@pytest.fixture(scope="session", autouse=True)
def starts():
    """Programs that tests start are forks of one interpreter, but those of tests marked `cold`. So are ranks of mpirun
    that `run_ranks` starts.
    """
    with warm_starts(launcher.environment()), stubs() as launcher.STUB:
        yield
    launcher.STUB = []


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    with cold_starts() if item.get_closest_marker("cold") else contextlib.nullcontext():
        yield


def no_figure(width: float, height: float):
    raise ImportError("no picture")


@pytest.fixture(scope="module", autouse=True)
def cpus():
    """A rank that ran in this process has bound its thread, and what is started later would inherit that."""
    given = os.sched_getaffinity(0)
    yield
    os.sched_setaffinity(0, given)


@pytest.fixture(autouse=True)
def remains():
    """Cleans up after a test.

    Ranks that failed in this process keep up to 800 connections until garbage is collected, and 1,024 is a usual limit.
    An mpirun that was killed leaves its folder. A later one that is given the same process number then ends with "The
    PMIx server's listener thread failed to start".
    """
    yield
    if len(os.listdir("/proc/self/fd")) > MANY_DESCRIPTORS:
        gc.collect()
    for session in pathlib.Path(os.environ[MPIRUN_SESSIONS]).glob("*.*"):
        if not pathlib.Path("/proc", session.suffix[1:]).exists():
            shutil.rmtree(session, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session) -> None:
    """Each worker imports another part of the files first, so that a file without bytecode is compiled by one worker
    and not by all. pytest reports files that cannot be imported when it collects them.
    """
    config = session.config
    if not hasattr(config, "workerinput") or [pathlib.Path(name).resolve() for name in config.args] != [ROOT / "tests"]:
        return
    number, count = int(config.workerinput["workerid"].removeprefix("gw")), config.workerinput["workercount"]
    for path in sorted((ROOT / "tests").rglob("test_*.py"))[number::count]:
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def pytest_collection_modifyitems(items) -> None:
    """A test's room is its marker, too: `pytest -m unit`. The longest tests come first, then those over hosts, which
    wait for seconds. None of them is left at the end.
    """
    for item in items:
        item.add_marker(room_of(item.nodeid))
    items.sort(key=lambda item: (item.path.name not in LONGEST, room_of(item.nodeid) != "hosts"))


def pytest_collection_finish() -> None:
    """What was collected stays: it is not searched for garbage, neither before nor while tests run."""
    gc.freeze()
    gc.set_threshold(20_000)  # 700 cost 4 % of the time of models in tests, and 5,000 one
    gc.enable()


def pytest_terminal_summary(terminalreporter) -> None:
    seconds: collections.Counter[str] = collections.Counter()
    tests: dict[str, set[str]] = collections.defaultdict(set)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[room_of(report.nodeid)] += report.duration
                tests[room_of(report.nodeid)].add(report.nodeid)
    rooms = (f"{room} {seconds[room]:.0f} s ({len(tests[room])} tests)" for room in sorted(seconds))
    terminalreporter.write_line(", ".join(rooms))
    for reason, count in sorted(skips(terminalreporter.stats.get("skipped", ())).items()):
        terminalreporter.write_line(f"skipped {count}: {reason}")


def skips(reports) -> collections.Counter[str]:
    """How many tests were skipped for each reason."""
    reasons = (report.longrepr[2] for report in reports if isinstance(report.longrepr, tuple | list))
    return collections.Counter(reason.removeprefix("Skipped: ") for reason in reasons)


def room_of(nodeid: str) -> str:
    """The folder below tests/ that a test is in."""
    return nodeid.split("/", 2)[1]
