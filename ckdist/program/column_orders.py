"""Matrices whose columns are in an order of their own: the step before them writes its activations in this order."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckdist.errors import ConfigError
from ckdist.program.lowered import Lowered


def with_orders(lowered: Lowered, sources: Mapping[str, Any]) -> Lowered:
    """Gives activations the order of the matrices that read them.

    Args:
        sources: Name of a weight -> its TensorSource.

    Raises:
        ConfigError: Matrices of one value have different orders, or a step other than `linear` has such a matrix.
    """
    orders = {name: source.scales.order for name, source in sources.items() if source.scales and source.scales.order}
    found: dict[int, tuple[str, bytes | None]] = {}  # activations -> a matrix that reads them, and its order
    linears: set[str] = set()
    for step in lowered.steps:
        for product in step.fields["products"] if step.kind == "linear" else ():
            name = lowered.matrices[product["weight"].first].name
            linears.add(name)
            first, order = found.setdefault(product["x"].first, (name, orders.get(name)))
            if order != orders.get(name):
                raise ConfigError(f"{first} and {name} read one value in different orders of columns (desc_act)")
    used = {key.name for key in lowered.matrices} & set(orders)
    if others := sorted(used - linears):
        raise ConfigError(f"{others[0]} has columns in an order of its own (desc_act), which only linears have")
    buffers = list(lowered.buffers)
    for index, (_, order) in found.items():
        if order is not None:
            buffers[index] = replace(buffers[index], order=np.frombuffer(order, np.int32))
    return replace(lowered, buffers=buffers)
