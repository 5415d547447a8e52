"""Fields of generation_config.json on the first tokens of an encoder-decoder, and on words that it must not generate.

Newer files have these fields only here, not in config.json. If both files have one, this file wins, as in transformers.
All other fields are ignored: the request sets the sampling parameters.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from ckdist.weights.json_file import read_json_object

FILE = "generation_config.json"
RULES = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")


def with_generation_rules(config: Mapping[str, Any], folder: pathlib.Path) -> Mapping[str, Any]:
    """Adds RULES from the folder's generation_config.json, if it exists, to a config.json.

    Raises ModelFileError if that file is not a JSON object.
    """
    path = folder / FILE
    given = read_json_object(path) if path.exists() else {}
    return {**config, **{name: given[name] for name in RULES if given.get(name) is not None}}
