"""The golden families that tests of all layouts run."""

from tests.support.distinct_families import NAMES, chosen_families


def test_they_have_every_form():
    assert NAMES.split() == chosen_families(), "another family has new forms: write these names into NAMES"
