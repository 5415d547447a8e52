"""`--layout auto` over two hosts whose link is limited: stages where it is slow, tensors where it is not."""

import math
import re
import shutil

import pytest

from tests.support.delayed_link import LinkDelay
from tests.support.hosts import Hosts, start, why_not
from tests.support.paths import ROOT

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


def said_by_ranks(hosts, *words: str) -> str:
    """Runs a rank on each host without mpirun, and returns their output."""
    output = start(hosts, "torchrun", 1, *words)
    output.wait(60)
    return output.text()


def test_a_model_is_served_in_the_layout_that_was_chosen(hosts):
    """One line says why; flags that name another way go before it."""
    hosts.limit_link(100)
    words = ["-m", "ckdist.cli.main", "generate", "-m", str(ROOT / "tests/golden/llama3"), "-p", "", "-n", "1"]
    words += ["-t", "1", "-v"]
    _, said = hosts.run(1, *words)  # under mpirun
    assert re.search(r"^layout: 2 stages rather than tensors over all ranks: predicted", said, re.MULTILINE), said
    assert "stage 0 of 2: embedding" in said, said
    said = said_by_ranks(hosts, *words, "-tp", "2", "--layout", "auto")
    assert "layout: tensors over all ranks: flags, ranks and layers leave no other" in said, said
    for flags in (("-pp", "1"), ("--prefill", "tensor")):
        said = said_by_ranks(hosts, *words, *flags)
        assert "layout:" not in said and "stage 0 of" not in said, said
