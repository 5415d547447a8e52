"""What generation_config.json says of how an encoder-decoder begins and what it never writes.

Newer writers leave these fields out of config.json. Where both files have one, transformers follows this file, and so
does this. How texts are sampled is the request's to say, so all other fields are left.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from ckdist.weights.json_file import read_json_object

FILE = "generation_config.json"
RULES = ("decoder_start_token_id", "forced_bos_token_id", "bad_words_ids")


def with_generation_rules(config: Mapping[str, Any], folder: pathlib.Path) -> Mapping[str, Any]:
    """A config.json with these rules of the file beside it, where there is one. ModelFileError where that is no JSON
    object.
    """
    path = folder / FILE
    given = read_json_object(path) if path.exists() else {}
    return {**config, **{name: given[name] for name in RULES if given.get(name) is not None}}
