"""Chooses the placement of experts over several hosts: slices of each expert on all ranks, or whole experts per host.

With slices over hosts, each layer needs two sums of all rows. With whole experts, hosts share rows out, and a row goes
only to the hosts that have its experts (comm/row_exchange.h). That needs more messages with fewer bytes, so it is
faster from some number of rows on. But chance decides which experts are used, so one host reads more than another.
"""

import math

from ckdist.comm.transports.link import Exchange, Link, one_sum
from ckdist.models.spec import ModelSpec, MoeFfn

BLOCK = 256  # columns of the largest quantisation block
ELEMENT_BYTES = 1.5  # bytes per activation for products with quantised weights
WEIGHT_BYTES = 0.6  # bytes per quantised weight
READ = 50e9  # bytes/s of weights that one rank reads
ANSWER = 128  # decoded tokens per prompt of one large step
LEAST_GAIN = 0.1  # fraction of an exchange's time that dispatch must save
DISPATCH_MESSAGES = 5  # sequential messages of a layer: sums of rows, choices, rows, results, activations of all rows


def summed(rows: int, width: int, hosts: int, direct_bytes: int) -> Exchange:
    """The exchange of a layer with slices: two sums."""
    one = one_sum(rows, width, hosts, direct_bytes)
    return Exchange(2 * one.sent, 2 * one.messages)


def dispatched(rows: int, width: int, ffn: MoeFfn, hosts: int, element_bytes: float) -> Exchange:
    """The exchange of a layer with dispatch: sums of own rows, and rows to and from the hosts of their experts."""
    to_all = rows / hosts * (hosts - 1)
    reached = 1.0 if ffn.shared_size else 1 - (1 - 1 / hosts) ** ffn.routing.used  # part of the hosts that a row needs
    choices = to_all * (2 * ffn.routing.used + 1) * 4
    return Exchange(to_all * (1 + reached) * width * (4 + element_bytes) + choices, DISPATCH_MESSAGES)


def dispatch_from(
    spec: ModelSpec, hosts: int, link: Link, most: int, direct_bytes: int, element_bytes: float = ELEMENT_BYTES
) -> int | None:
    """The least rows, `most` or a power of two below it, from which dispatch is faster. None: it never is."""
    layers, width, found = _mixtures(spec), spec.hidden_size, None
    for rows in sorted({most, *(1 << power for power in range(most.bit_length()) if 1 << power <= most)}, reverse=True):
        limit = (1 - LEAST_GAIN) * summed(rows, width, hosts, direct_bytes).seconds(link)
        if not all(dispatched(rows, width, ffn, hosts, element_bytes).seconds(link) < limit for ffn in layers):
            break
        found = rows
    return found if layers else None


def sliced_factor(ffn: MoeFfn, ranks: int) -> float:
    """Bytes that a rank reads of sliced experts, relative to 1 / ranks of them: down projections have whole blocks."""
    width = ffn.intermediate_size / ranks
    return (2 + min(max(math.ceil(width / BLOCK) * BLOCK, width), ffn.intermediate_size) / width) / 3


def whole_factor(used: int, hosts: int) -> float:
    """Expected number of used experts on the busiest of `hosts` hosts, relative to the mean. `used`: in total."""
    mean = used / hosts
    spread = math.sqrt(2 * mean * (1 - 1 / hosts) * math.log(hosts))
    return min(mean + spread, used) / mean


def choose_placement(
    spec: ModelSpec, ranks: int, hosts: int, link: Link, rows: int, direct_bytes: int, dispatches: bool
) -> tuple[bool, str]:
    """(whether hosts have whole experts, the reason): for a prompt of `rows` tokens and an answer of ANSWER tokens.

    `dispatches`: dispatch is possible. If not, results of whole experts are summed over all hosts, too.
    """
    layers, width = _mixtures(spec), spec.hidden_size
    one, many = (summed(count, width, hosts, direct_bytes) for count in (1, rows))
    dispatches = dispatches and dispatch_from(spec, hosts, link, rows, direct_bytes) is not None
    slices = whole = 0.0
    for ffn in layers:
        read = 3 * ffn.routing.used * ffn.intermediate_size * width * WEIGHT_BYTES / ranks / READ
        prompt = dispatched(rows, width, ffn, hosts, ELEMENT_BYTES) if dispatches else many
        slices += many.seconds(link) + ANSWER * (one.seconds(link) + read * sliced_factor(ffn, ranks))
        whole += prompt.seconds(link) + ANSWER * (one.seconds(link) + read * whole_factor(ffn.routing.used, hosts))
    each = [seconds / len(layers) * 1e3 for seconds in (whole, slices)]
    chosen = each[0] < each[1]
    return chosen, (
        f"{'whole experts on each host' if chosen else 'slices of every expert on every rank'}: for a prompt of {rows} "
        f"tokens and {ANSWER} decoded a layer is predicted to take {each[0]:.2f} ms with whole experts and "
        f"{each[1]:.2f} ms with slices; {link}"
    )


def _mixtures(spec: ModelSpec) -> list[MoeFfn]:
    """The layers with experts."""
    return [layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeFfn)]
