import pytest

from tests.support.levels import ALL, each


@pytest.mark.parametrize("level", ALL)
def test_a_level_that_this_cpu_has_is_tested(level):
    if ALL[level]:
        pytest.skip(f"level {level}: this CPU lacks {ALL[level]}")
    assert level in each()
