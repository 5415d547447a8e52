"""Writes ckdist/native/kernels/grids.h: the grids of the I-quants, constants of GGUF, as the gguf package knows them.

    python tests/golden/make_grids.py

An entry of 8 values holds their places among the grid's levels in 2 bits each, one of 4 values in 4 bits each, the
first value lowest.
"""

import pathlib

import numpy as np
from gguf import quants

GRIDS = {
    "kGridIq1": "IQ1_S",
    "kGridIq2Xxs": "IQ2_XXS",
    "kGridIq2Xs": "IQ2_XS",
    "kGridIq2S": "IQ2_S",
    "kGridIq3Xxs": "IQ3_XXS",
    "kGridIq3S": "IQ3_S",
}
HEADER = """\
// The grids of the I-quants, constants of GGUF. Written by tests/golden/make_grids.py.
// An entry of 8 values holds their places among the grid's levels in 2 bits each, one of 4 values in 4 bits each, the
// first value lowest.
#pragma once
#include <cstdint>

namespace ckdist {
"""
PATH = pathlib.Path(__file__).parents[2] / "ckdist/native/kernels/grids.h"


def entries_of(kind) -> np.ndarray:
    kind.init_grid()
    levels = np.searchsorted(kind.grid_map, kind.grid.reshape(kind.grid_shape)).astype(np.uint16)
    count, values = levels.shape
    assert np.array_equal(np.array(kind.grid_map, np.float32)[levels], kind.grid.reshape(count, values))
    return (levels << np.arange(0, 16, 16 // values, dtype=np.uint16)).sum(1, dtype=np.uint16)


def main() -> None:
    text = HEADER
    for name, kind in GRIDS.items():
        entries = entries_of(getattr(quants, kind))
        text += f"\ninline constexpr uint16_t {name}[{len(entries)}] = {{\n"
        numbers = [f"{entry}," for entry in entries]
        line = "   "
        for number in numbers:
            if len(line) + 1 + len(number) > 120:
                text, line = text + line + "\n", "   "
            line += " " + number
        text += line + "\n};\n"
    PATH.write_text(text + "\n}  // namespace ckdist\n")


if __name__ == "__main__":
    main()
