"""`--layout auto` over two hosts whose link is limited: stages where it is slow, tensors where it is not."""

import re
import shutil

import pytest

from tests.support.hosts import Hosts, start, why_not
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(
    bool(why_not()) or not shutil.which("tc"), reason=f"no network namespaces here: {why_not() or 'tc not installed'}"
)


@pytest.fixture
def hosts():
    with Hosts() as hosts:
        yield hosts


@pytest.mark.parametrize("megabits, most_megabytes, stages", [(100, 14, 2), (10000, 10000, 1)])
def test_the_link_chooses(hosts, megabits, most_megabytes, stages):
    """All ranks alike, by the link as it was measured. Between the two a machine's own speed decides."""
    hosts.limit_link(megabits)
    output = start(hosts, "torchrun", 1, "tests/support/programs/layout.py")
    assert not any(output.wait(90)), output.text()
    found = re.findall(r"rank \d chose (\d) stages: .*predicted .* ms for a token of one .* (\d+) MB/s", output.text())
    assert len(found) == 2 and {int(count) for count, _ in found} == {stages}, output.text()
    assert all(0 < int(megabytes) <= most_megabytes for _, megabytes in found), output.text()


def test_a_model_is_served_in_the_layout_that_was_chosen(hosts):
    """One line says why; flags that name another way go before it."""
    hosts.limit_link(100)
    words = ["-m", "ckdist.cli.main", "generate", "-m", str(ROOT / "tests/golden/llama3"), "-p", "", "-n", "1"]
    words += ["-t", "1", "--layout", "auto", "-v"]
    _, said = hosts.run(1, *words)
    assert re.search(r"^layout: 2 stages rather than tensors over all ranks: predicted", said, re.MULTILINE), said
    assert "stage 0 of 2: embedding" in said, said
    _, said = hosts.run(1, *words, "-tp", "2")
    assert "layout: tensors over all ranks: flags, ranks and layers leave no other" in said, said
