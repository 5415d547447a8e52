"""Where the checkout, its tests and their golden files are."""

import pathlib

ROOT = pathlib.Path(__file__).parents[2]
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
