"""Where experts live over several hosts: slices of every expert on every rank, or whole experts on each host.

Inside a host every rank has a slice of every expert of its host. Between hosts slices need the sum of all rows, twice a
layer. Whole experts can do with less: hosts share rows out, and a row goes only to the hosts that have its experts
(comm/row_exchange.h). That is more messages with fewer bytes, so it pays from some number of rows on. Reading weights
differs as well: narrow slices overlap in whole quantisation blocks, and whole experts are chosen by chance, so one host
reads more than another.

Here is what both are predicted to take, by the bytes and by the latency of the transport, and what follows from that.
"""

import math
from dataclasses import dataclass

from ckdist.comm.transports.link import Link
from ckdist.models.spec import ModelSpec, MoeFfn

BLOCK = 256  # columns of the largest quantisation block
ELEMENT_BYTES = 1.5  # of an activation that products read, as quantised weights have it
WEIGHT_BYTES = 0.6  # of a weight, likewise
READ = 50e9  # bytes per second of weights that one rank reads
ANSWER = 128  # tokens that are decoded for a prompt of one large step
LEAST_GAIN = 0.1  # of an exchange's time, before more messages are sent for it
SUM_MESSAGES = 2  # of a sum that is too large to go whole to every host, one after the other
DISPATCH_MESSAGES = 5  # of a layer: its rows' sums, what they take, rows, what came of them, activations of all


@dataclass(frozen=True)
class Exchange:
    """What a layer sends between hosts: bytes that leave the busiest, in so many messages one after the other."""

    sent: float
    messages: int

    def seconds(self, link: Link) -> float:
        """How long that takes."""
        return self.messages * link.seconds + self.sent / link.rate


def one_sum(rows: int, width: int, hosts: int, direct_bytes: int) -> Exchange:
    """Of a sum of `rows` rows over all hosts. `direct_bytes`: that go whole to every host where there are three."""
    count = rows * width * 4
    if hosts == 2 or count <= direct_bytes:
        return Exchange(1.0 * (hosts - 1) * count, 1)
    return Exchange(2.0 * (hosts - 1) / hosts * count, SUM_MESSAGES)


def summed(rows: int, width: int, hosts: int, direct_bytes: int) -> Exchange:
    """Of two such sums, as a layer has them."""
    one = one_sum(rows, width, hosts, direct_bytes)
    return Exchange(2 * one.sent, 2 * one.messages)


def dispatched(rows: int, width: int, ffn: MoeFfn, hosts: int, element_bytes: float) -> Exchange:
    """Of rows that the hosts share out: sums of own rows, and rows to and from the hosts that have their experts."""
    to_all = rows / hosts * (hosts - 1)
    to_some = to_all * reached(ffn, hosts)
    choices = to_all * (2 * ffn.routing.used + 1) * 4
    return Exchange((to_all + to_some) * width * (4 + element_bytes) + choices, DISPATCH_MESSAGES)


def reached(ffn: MoeFfn, hosts: int) -> float:
    """The part of the other hosts that have something for a row; of experts that all rows take all have."""
    return 1.0 if ffn.shared_size else 1 - (1 - 1 / hosts) ** ffn.routing.used


def dispatch_from(
    spec: ModelSpec, hosts: int, link: Link, most: int, direct_bytes: int, element_bytes: float = ELEMENT_BYTES
) -> int | None:
    """The least number of rows of a step, a power of two up to `most`, from which on dispatch saves time; None: never.

    Bytes and messages of both are counted, with what `link` takes for them.
    """
    layers = _mixtures(spec)
    pays = lambda rows: all(
        dispatched(rows, spec.hidden_size, ffn, hosts, element_bytes).seconds(link)
        < (1 - LEAST_GAIN) * summed(rows, spec.hidden_size, hosts, direct_bytes).seconds(link)
        for ffn in layers
    )
    found = None
    for rows in sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}, reverse=True):
        if not layers or not pays(rows):
            break
        found = rows
    return found


def sliced_factor(ffn: MoeFfn, ranks: int) -> float:
    """Bytes that a rank reads of experts that are sliced, over its even share: the down projections' columns are whole
    blocks.
    """
    width = ffn.intermediate_size / ranks
    blocks = math.ceil(width / BLOCK) * BLOCK
    return (2 + min(max(blocks, width), ffn.intermediate_size) / width) / 3


def whole_factor(used: int, hosts: int) -> float:
    """Of so many chosen experts those that the busiest of `hosts` is expected to have, over their mean."""
    mean = used / hosts
    spread = math.sqrt(2 * mean * (1 - 1 / hosts) * math.log(hosts))
    return min(mean + spread, used) / mean


@dataclass(frozen=True)
class ExpertPlacement:
    """Whether hosts have whole experts, and a line that says why."""

    whole: bool
    reason: str


def choose_placement(
    spec: ModelSpec, ranks: int, hosts: int, link: Link, rows: int, direct_bytes: int, dispatches: bool
) -> ExpertPlacement:
    """What takes less for a prompt of `rows` tokens in one step and an answer of `ANSWER`, in the mean of its layers.

    `dispatches`: rows may go to the hosts of their experts, else whole experts are summed over all hosts too.
    """
    layers = _mixtures(spec)
    width, between = spec.hidden_size, lambda exchange: exchange.seconds(link)
    one, many = (summed(count, width, hosts, direct_bytes) for count in (1, rows))
    least = dispatch_from(spec, hosts, link, rows, direct_bytes) if dispatches else None
    slices = whole = moved = 0.0
    for ffn in layers:
        read = 3 * ffn.routing.used * ffn.intermediate_size * width * WEIGHT_BYTES / ranks / READ
        prompt = dispatched(rows, width, ffn, hosts, ELEMENT_BYTES) if least is not None else many
        slices += between(many) + ANSWER * (between(one) + read * sliced_factor(ffn, ranks))
        whole += between(prompt) + ANSWER * (between(one) + read * whole_factor(ffn.routing.used, hosts))
        moved += prompt.sent
    each = [seconds / len(layers) * 1e3 for seconds in (whole, slices)]
    chosen = each[0] < each[1]
    sent = [count / 1e6 for count in (moved / len(layers), many.sent)]
    return ExpertPlacement(
        chosen,
        f"{'whole experts on each host' if chosen else 'slices of every expert on every rank'}: for a prompt of {rows} "
        f"tokens and {ANSWER} decoded a layer is predicted to take {each[0]:.2f} ms with whole experts "
        f"({sent[0]:.2f} MB of the prompt sent) and {each[1]:.2f} ms with slices ({sent[1]:.2f} MB); {link}",
    )


def _mixtures(spec: ModelSpec) -> list[MoeFfn]:
    """The layers with experts."""
    return [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeFfn)]


def experts_hit(used: float, rows: float, alike: float = 0.0) -> float:
    """The part of all experts that some of the rows take, each of which takes the part `used` of them: by chance, or
    with a part of its choices that others made already.
    """
    return 1 - (1 - min(1.0, used)) ** (1 + (rows - 1) * (1 - alike))


__all__ = ["ExpertPlacement", "choose_placement", "dispatch_from", "experts_hit"]
