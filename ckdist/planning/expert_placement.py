"""Where experts live over several hosts: slices of every expert on every rank, or whole experts on each host.

Inside a host every rank has a slice of every expert of its host. All ranks have all activations, and add up what their
experts make of them, so both ways exchange the same sum in the same number of messages. They differ in the bytes that
the busiest host reads: slices are whole quantisation blocks, so narrow ones overlap; whole experts are chosen by
chance, so one host has more to do than another.
"""

import math

from ckdist.models.spec import ModelSpec, MoeFfn

BLOCK = 256  # columns of the largest quantisation block


def sliced_factor(ffn: MoeFfn, ranks: int) -> float:
    """Bytes that a rank reads of experts that are sliced, over its even share: the down projections' columns are whole
    blocks.
    """
    width = ffn.intermediate_size / ranks
    blocks = math.ceil(width / BLOCK) * BLOCK
    return (2 + min(max(blocks, width), ffn.intermediate_size) / width) / 3


def whole_factor(ffn: MoeFfn, hosts: int) -> float:
    """The chosen experts that the busiest of `hosts` is expected to have of one token, over their mean."""
    mean = ffn.routing.used / hosts
    spread = math.sqrt(2 * mean * (1 - 1 / hosts) * math.log(hosts))
    return min(mean + spread, ffn.routing.used) / mean


def prefers_whole_experts(spec: ModelSpec, ranks: int, hosts: int) -> bool:
    """Whether the busiest host reads less of whole experts than of slices. False without experts."""
    found = {layer.ffn for layer in spec.layers if isinstance(layer.ffn, MoeFfn)}
    return bool(found) and all(whole_factor(ffn, hosts) < sliced_factor(ffn, ranks) for ffn in found)
