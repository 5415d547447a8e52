"""Prices of steps: found again from the seconds that they make, and files that are not what they should be."""

import json

import pytest

from ckdist.errors import ConfigError
from ckdist.plan.step_cost import (
    LinearStepCost,
    StepTotals,
    fit_step_cost,
    linear_step_cost,
    read_step_cost,
    step_row,
)

COST = LinearStepCost((2, 16, 128), (0.02, 0.03, 0.2), 2e-3, 3e-7, 5e-6)
STEPS = [
    *(StepTotals(n, n * (n + 1) // 2, outputs=1) for n in (2, 16, 128)),
    *(StepTotals(128, 128 * first + 128 * 129 // 2) for first in (128, 256, 512)),
    *(StepTotals(decodes=n, decode_context=n * each, outputs=n) for n in (2, 16) for each in (64, 900)),
]


def test_prices_are_found_from_seconds():
    found = fit_step_cost([(step, COST.seconds(step)) for step in STEPS])
    assert found.per_output == pytest.approx(2e-3, rel=0.02)
    assert found.per_prompt_attended == pytest.approx(3e-7, rel=0.02)
    assert found.per_decode_context == pytest.approx(5e-6, rel=0.02)
    mixed = StepTotals(100, 40_000, 7, 3000, 8)
    assert found.seconds(mixed) == pytest.approx(COST.seconds(mixed), rel=0.01)


def test_no_price_is_below_zero_and_steps_beyond_the_table_go_on_in_proportion():
    falling = [(step, 0.1 - 1e-6 * step.decode_context) for step in STEPS]
    assert fit_step_cost(falling).per_decode_context == 0
    assert COST.seconds(StepTotals(256, 0)) == pytest.approx(2 * COST.seconds(StepTotals(128, 0)))


def test_prices_of_another_price_list_are_found_again():
    found = linear_step_cost(COST, 128, 16, 1024)
    mixed = StepTotals(100, 35_050, 5, 3500, 6)
    for step in (mixed, StepTotals(decodes=16, decode_context=16_000, outputs=16), StepTotals(16, 136, outputs=1)):
        assert found.seconds(step) == pytest.approx(COST.seconds(step), rel=0.02)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON"),
        ("[]", "needs a list of 1 to"),
        ("[1]", "has a row '1'"),
        (json.dumps([step_row(STEPS[0], -1.0)]), "which needs positive numbers"),
        (json.dumps([step_row(STEPS[0], 0.0)]), "which needs positive numbers"),
        (json.dumps([step_row(STEPS[0], 10**400)]), "which needs positive numbers"),
        (json.dumps([step_row(StepTotals(decodes=1, outputs=1), 0.1)]), "no step of one prompt"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_file_that_is_none(tmp_path, text, message):
    path = tmp_path / "steps.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as error:
        read_step_cost(str(path))
    assert "\n" not in str(error.value) and ("no step of" in message or str(path) in str(error.value))
    with pytest.raises(ConfigError, match=f"cannot read --steps {tmp_path}: "):
        read_step_cost(str(tmp_path))
