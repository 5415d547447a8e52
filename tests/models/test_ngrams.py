"""Tables of n-grams: the hashes of config.json must be those of the files."""

import json
import shutil

import pytest

from ckdist.errors import ModelFileError
from ckdist.models.gated_fields import multipliers, primes_from
from ckdist.weights.checkpoint import open_checkpoint
from tests.support.paths import GOLDEN


def test_the_constants_of_the_published_model():
    """As they are in its files."""
    assert multipliers(248320, 3, 1234) == (23703573157769, 20109073645365, 8052911324071)
    assert primes_from(20_000_000, 16)[::15] == (20000003, 20000171)


@pytest.mark.parametrize(
    "field, value, why",
    [
        ("seed", 5, r"layer_multipliers' has \d+ at 0, but \d+ follows from config\.json"),
        ("ple_layer_ids", [1, 2], r"ple_layer_ids is \[1, 2\]; it must be a list of at most one layer"),
        ("split_ngram_parts", 7, r"split_ngram_parts is 7; it must be a divisor of the 240 rows"),
        ("indexer_budget", 10, r"indexer_budget is 10; it must be a multiple of 4"),
        ("output_gate_type", "gelu", r"output_gate_type is 'gelu'; it must be sigmoid or silu"),
    ],
)
def test_other_numbers_are_refused_in_a_line(tmp_path, field, value, why):
    folder = shutil.copytree(GOLDEN / "qwen4_exp", tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][field] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=why) as refused:
        open_checkpoint(folder)
    assert "\n" not in str(refused.value)
