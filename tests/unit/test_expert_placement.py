"""Where experts live: by the bytes that are read and sent, and by the latency of what joins the hosts."""

from ckdist.comm.transports.link import Link
from ckdist.comm.transports.transport_choice import LARGE, SMALL
from ckdist.layouts.expert_placement import choose_placement, dispatch_from, dispatched, summed
from ckdist.models.spec import MoeFfn
from ckdist.program.routing import Routing
from tests.support.specs import spec

SLOW, FAST, FAR = Link(30e-6, 0.1e9), Link(5e-6, 12e9), Link(5e-3, 12e9)
DIRECT = 32 << 10


def mixture(experts=64, size=1536, used=8, shared=0, hidden=2048):
    return spec(hidden=hidden, layer={"ffn": MoeFfn(experts, size, Routing(used), shared_size=shared)})


def placed(link, dispatches=True, ranks=4, hosts=2, **numbers):
    return choose_placement(mixture(**numbers), ranks, hosts, link, 512, DIRECT, dispatches)


def test_less_is_sent_where_bytes_cost():
    """Reading is more even with slices; where the link is slow, what a prompt sends decides."""
    assert not placed(FAST)[0] and placed(SLOW)[0]
    assert not placed(SLOW, dispatches=False)[0]  # whole experts whose rows are summed send as much as slices


def test_narrow_slices_are_read_twice():
    """Of 96 columns a slice takes a block of 256."""
    assert placed(FAST, size=768, ranks=8)[0]


def test_latency_forbids_more_messages():
    assert dispatch_from(mixture(), 2, FAR, 512, DIRECT) is None
    few, many = (dispatch_from(mixture(), 2, Link(seconds, 1e9), 4096, DIRECT) for seconds in (5e-6, 200e-6))
    assert few is not None and many is not None and few < many
    assert not placed(FAR)[0]


def test_bytes_are_those_of_rows():
    """Two hosts, ten rows of 2048: sums send all rows twice; shared out, half of them go four ways."""
    ffn = mixture(used=1).layers[0].ffn
    assert summed(10, 2048, 2, DIRECT).sent == 2 * 10 * 2048 * 4
    assert dispatched(10, 2048, ffn, 2, 4.0).sent == (5 + 2.5) * 2048 * 8 + 5 * 3 * 4
    shared = mixture(used=1, shared=64).layers[0].ffn
    assert dispatched(10, 2048, shared, 2, 4.0).sent == (5 + 5) * 2048 * 8 + 5 * 3 * 4


def test_reason_has_both_times_and_what_was_measured():
    _, reason = placed(SLOW)
    assert reason.startswith("whole experts on each host: for a prompt of 512 tokens and 128 decoded a layer is ")
    assert reason.endswith("30 µs and 0.10 GB/s between hosts") and reason.count(" ms") == 2


def test_a_link_is_what_two_exchanges_say():
    link = Link.of_exchanges(50e-6 + SMALL[0] / 1e9, 50e-6 + LARGE[0] / 1e9)
    assert abs(link.seconds - 50e-6) < 1e-9 and abs(link.rate - 1e9) < 1
    assert Link.of_exchanges(1e-3, 1e-3).seconds > 0  # a clock that saw no difference
