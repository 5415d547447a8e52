"""Chooses the placement of experts over several hosts: slices of each expert on all ranks, or whole experts per host.

In both, each rank of a host has a slice of each expert of the host. With slices over hosts, each layer needs two sums
of all rows. With whole experts, hosts share rows out, and a row goes only to the hosts that have its experts
(comm/row_exchange.h). That needs more messages with fewer bytes, so it is faster from some number of rows on.

Reading weights differs too. Narrow slices overlap, because they consist of whole quantisation blocks. With whole
experts, chance decides which are used, so one host reads more than another. The prediction here uses bytes, and the
latency and bandwidth of the link.
"""

import math
from dataclasses import dataclass

from ckdist.comm.transports.link import Link
from ckdist.models.spec import ModelSpec, MoeFfn

BLOCK = 256  # columns of the largest quantisation block
ELEMENT_BYTES = 1.5  # bytes per activation for products with quantised weights
WEIGHT_BYTES = 0.6  # bytes per quantised weight
READ = 50e9  # bytes/s of weights that one rank reads
ANSWER = 128  # decoded tokens per prompt of one large step
LEAST_GAIN = 0.1  # fraction of an exchange's time that dispatch must save
SUM_MESSAGES = 2  # sequential messages of a sum that is too large to go whole to each host
DISPATCH_MESSAGES = 5  # sequential messages of a layer: sums of rows, choices, rows, results, activations of all rows


@dataclass(frozen=True)
class Exchange:
    """The exchange between hosts in a layer."""

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


def summed(rows: int, width: int, hosts: int, direct_bytes: int) -> Exchange:
    """The exchange of a layer with slices: two sums."""
    one = one_sum(rows, width, hosts, direct_bytes)
    return Exchange(2 * one.sent, 2 * one.messages)


def dispatched(rows: int, width: int, ffn: MoeFfn, hosts: int, element_bytes: float) -> Exchange:
    """The exchange of a layer with dispatch: sums of own rows, and rows to and from the hosts of their experts."""
    to_all = rows / hosts * (hosts - 1)
    to_some = to_all * reached(ffn, hosts)
    choices = to_all * (2 * ffn.routing.used + 1) * 4
    return Exchange((to_all + to_some) * width * (4 + element_bytes) + choices, DISPATCH_MESSAGES)


def reached(ffn: MoeFfn, hosts: int) -> float:
    """The fraction of other hosts that have experts of a row; 1 if there is a shared expert."""
    return 1.0 if ffn.shared_size else 1 - (1 - 1 / hosts) ** ffn.routing.used


def dispatch_from(
    spec: ModelSpec, hosts: int, link: Link, most: int, direct_bytes: int, element_bytes: float = ELEMENT_BYTES
) -> int | None:
    """The smallest number of rows, `most` or a power of two below it, from which on dispatch is faster; None: never."""
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
    """Bytes that a rank reads of sliced experts, relative to 1 / ranks of them.

    More than 1, because columns of the down projections are read in whole blocks.
    """
    width = ffn.intermediate_size / ranks
    blocks = math.ceil(width / BLOCK) * BLOCK
    return (2 + min(max(blocks, width), ffn.intermediate_size) / width) / 3


def whole_factor(used: int, hosts: int) -> float:
    """Expected number of used experts on the busiest of `hosts` hosts, relative to the mean. `used`: in total."""
    mean = used / hosts
    spread = math.sqrt(2 * mean * (1 - 1 / hosts) * math.log(hosts))
    return min(mean + spread, used) / mean


@dataclass(frozen=True)
class ExpertPlacement:
    """Whether hosts have whole experts, and the reason in one line."""

    whole: bool
    reason: str


def choose_placement(
    spec: ModelSpec, ranks: int, hosts: int, link: Link, rows: int, direct_bytes: int, dispatches: bool
) -> ExpertPlacement:
    """Chooses the faster placement for a prompt of `rows` tokens in one step and an answer of `ANSWER` tokens.

    `dispatches`: dispatch is possible. If not, results of whole experts are summed over all hosts, too.
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


def experts_hit(used: float, rows: float, shared_choices: float = 0.0) -> float:
    """1 - (1 - used) ** (1 + (rows - 1) * (1 - shared_choices)): the expected fraction of experts that some row uses.

    Args:
        used: The fraction that one row uses.
        rows: Number of rows.
        shared_choices: The fraction of a row's choices that other rows have made already.
    """
    return 1 - (1 - min(1.0, used)) ** (1 + (rows - 1) * (1 - shared_choices))


__all__ = ["ExpertPlacement", "choose_placement", "dispatch_from", "experts_hit"]
