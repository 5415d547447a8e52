"""`--layout auto` over two hosts whose link is limited: stages where it is slow, tensors where it is not."""

import logging
import math
import re
import shutil

import pytest

from ckdist.config.engine_config import EngineConfig
from ckdist.engine.load_model import load_model
from tests.support.delayed_link import LinkDelay
from tests.support.hosts import Hosts, start, why_not
from tests.support.paths import GOLDEN
from tests.support.thread_ranks import run_threads

MODEL = GOLDEN / "llama3"

pytestmark = pytest.mark.skipif(
    bool(why_not()) or not shutil.which("tc"), reason=f"no network namespaces here: {why_not() or 'tc not installed'}"
)


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


PREDICTED = (
    r"rank \d chose (\d) stages: .*predicted ([\d.]+) against ([\d.]+) ms for a token of one sequence, ([\d.]+) "
    r"against ([\d.]+) ms of 8 sequences, ([\d.]+) against ([\d.]+) s for a prompt.* (\d+) µs and (\d+) MB/s"
)


@pytest.mark.parametrize(
    "megabits, delay, most_megabytes", [(100, None, 14), (10000, None, 10000), (1000, LinkDelay(0.02, 0.0), 1000)]
)
def test_the_link_chooses(megabits, delay, most_megabytes):
    """All ranks alike, what is predicted to be faster by the link as it was measured. A slow one takes stages; with a
    fast one a message's latency decides, which other work on this machine makes longer.
    """
    with Hosts(delay) as hosts:
        hosts.limit_link(megabits)
        output = start(hosts, "torchrun", 1, "tests/support/programs/layout.py")
        assert not any(output.wait(90)), output.text()
    found = [[float(number) for number in line] for line in re.findall(PREDICTED, output.text())]
    assert len(found) == 2 and found[0] == found[1], output.text()
    stages, *times, microseconds, megabytes = found[0]
    assert math.prod(times[::2]) <= math.prod(times[1::2]) * 1.05, output.text()  # of numbers with three digits
    assert (stages == 2 or megabits == 10000) and 0 < megabytes <= most_megabytes, output.text()
    assert not delay or microseconds >= 0.9 * delay.seconds * 1e6, output.text()


def test_a_model_is_served_in_the_layout_that_was_chosen(hosts):
    """One line says why."""
    hosts.limit_link(100)
    words = ["generate", "-m", str(MODEL), "-p", "", "-n", "1", "-t", "1", "-v"]
    _, said = hosts.run(1, "-m", "ckdist.cli.main", *words)  # under mpirun
    assert re.search(r"^layout: 2 stages rather than tensors over all ranks: predicted", said, re.MULTILINE), said
    assert "stage 0 of 2: embedding" in said, said


@pytest.mark.parametrize(
    "flags, reasons",
    [
        (
            {"tensor_parallel_size": 2, "layout": "auto"},
            ["tensors over all ranks: flags, ranks and layers leave no other"],
        ),
        ({"pipeline_parallel_size": 1}, []),
        ({"prefill": "tensor"}, []),
    ],
)
def test_flags_that_name_another_way_go_before_it(caplog, flags, reasons):
    config = EngineConfig(model=str(MODEL), threads=1, **flags)
    with caplog.at_level(logging.INFO):
        run_threads("ab", lambda world: load_model(config, world).close())
    assert [line.removeprefix("layout: ") for line in caplog.messages if line.startswith("layout: ")] == reasons
    assert "stage 0 of" not in caplog.text
