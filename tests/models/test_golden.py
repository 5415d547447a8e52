"""Whole models against golden logits and text that independent implementations made, with one rank, two and three."""

import json

import pytest

from tests.support.launcher import run_ranks
from tests.support.paths import GOLDEN

# Root mean square and largest difference of logits whose largest is about 4. Floats differ by summation order alone; bfloat16
# activations keep 8 bits, int8 ones a scale per 32 columns. llama.cpp's own differences on these files: 0.021 and 0.12 for types
# with blocks of 32, 0.031 and 0.19 for those of 256.
TOLERANCE = {"F32": (2e-6, 1e-5), "F16": (2e-6, 1e-5), "BF16": (0.0065, 0.05)}
QUANTISED = (0.024, 0.14)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_type(ranks):
    done = run_ranks(ranks, "tests/support/programs/golden_types.py", str(GOLDEN / "gguf"))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) == 25
    for name, result in results.items():
        rms, largest = TOLERANCE.get(name, QUANTISED)
        assert result["rms"] < rms and result["max"] < largest, f"{name}: {result}"
        assert result["invariant"], f"{name}: one token at a time gave other bits than a chunk"


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_family(ranks):
    done = run_ranks(ranks, "tests/support/programs/golden_families.py", str(GOLDEN))
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) >= 7
    for name, result in results.items():
        assert result["max"] < 2e-5 * max(1.0, result["scale"]), f"{name}: {result}"
        assert result["same_bits"], name
        assert result["greedy_equal"] == result["greedy_tokens"] == 200, f"{name}: {result}"
