"""The cost of messages and sums between hosts, measured before anything is loaded. All ranks get the same values."""

from dataclasses import dataclass
from typing import NamedTuple

from ckdist import native
from ckdist.comm.world_protocol import World

SMALL, LARGE = (16 << 10, 40), (1 << 20, 5)  # bytes and calls of a measured exchange
FEW = SMALL[0], 3  # on a link of 50 ms, 40 calls would take two seconds
TINY = 1 << 10, 40  # of exchanges that are nearly all latency
LEAST_SHARE = 0.25  # of a large exchange, for its bytes: two times that are nearly equal tell nothing about the rate
SUM_MESSAGES = 2  # sequential messages of a sum that is too large to go whole to each host
LEAST_SECONDS = 1e-6  # lower bound of a message: clocks and queues make short ones look free


@dataclass(frozen=True)
class Link:
    """seconds(bytes) = seconds + bytes / rate."""

    seconds: float  # latency of a message
    rate: float  # bytes per second

    def message(self, count: float) -> float:
        """Seconds of a message of `count` bytes."""
        return self.seconds + count / self.rate

    @staticmethod
    def of_exchanges(small: float, large: float, size: int = SMALL[0]) -> "Link":
        """The link whose exchanges of `size` and of `LARGE` bytes take `small` and `large` seconds."""
        rate = (LARGE[0] - size) / max(large - small, large * LEAST_SHARE, LEAST_SECONDS)
        return Link(max(small - size / rate, LEAST_SECONDS), rate)

    def __str__(self) -> str:
        return f"{self.seconds * 1e6:.0f} µs and {self.rate / 1e9:.2f} GB/s between hosts"


NOMINAL_LINK = Link(30e-6, 1e9)


class Exchange(NamedTuple):
    """An exchange between hosts."""

    sent: float  # bytes that the busiest host sends
    messages: int  # sequential messages

    def seconds(self, link: Link) -> float:
        """Returns messages * latency + bytes / bandwidth."""
        return self.messages * link.seconds + self.sent / link.rate


def one_sum(rows: int, width: int, hosts: int, direct_bytes: int) -> Exchange:
    """The exchange of a sum of `rows` rows over all hosts.

    With three or more hosts, sums of up to `direct_bytes` go whole to each host.
    """
    count = rows * width * 4
    if hosts == 2 or count <= direct_bytes:
        return Exchange(1.0 * (hosts - 1) * count, 1)
    return Exchange(2.0 * (hosts - 1) / hosts * count, SUM_MESSAGES)


def measured_link(world: World, transport: str, timeout: float) -> Link:
    """The link between rank 0 and the slowest of some hosts, over the transport that steps will use. A collective call.

    Raises ConfigError or CommError if no transport connects the hosts.
    """
    from ckdist.comm.transports.transport_choice import choose_transport, exchange_seconds

    chosen = choose_transport(world, transport, timeout)
    try:
        small, large = world.broadcast(exchange_seconds(world, chosen.handle, (TINY, LARGE)))
        return Link.of_exchanges(small, large, TINY[0])
    finally:
        native.ffi.release(chosen.handle)
