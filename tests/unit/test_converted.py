"""GGUF metadata as llama.cpp's converter (b11434) writes it of the golden models: one spec, and every tensor is read.

configs/converted.json has the metadata, and the tensors' names and dimensions. Entry `large3` is the model of
`mistral4` in the form of Mistral Large 3: params.json and consolidated.safetensors, which the converter reads as
deepseek2. Entry `deepseek_v4` has a config of its own, since GGUF has only windows of 4 and 128 tokens; its metadata is
that of a file that llama.cpp loads and whose logits are those of transformers.
"""

import dataclasses
import json

import numpy as np
import pytest

from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import family, spec_from_config, spec_from_gguf
from tests.support.paths import GOLDEN

CONVERTED = json.loads((GOLDEN / "configs" / "converted.json").read_text())
# Fields that GGUF says otherwise: norms of low ranks have the model's epsilon there, groups of one have no scores, and
# GLM-4.7-Flash and Granite 4 have the names of other families. llama.cpp does not scale Mistral Small 4's queries, so
# its files have no numbers for that, and the published ones are assumed.
OTHERWISE = {
    **{key: {"norm_eps"} for key in ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear")},
    "mistral4": {"query_scale"},
    "large3": {"group_scores"},
}


def flat(value, prefix=""):
    """(name of a field, number) for all fields of a spec; floats with the digits of float32."""
    if dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from flat(getattr(value, field.name), f"{prefix}.{field.name}")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from flat(item, f"{prefix}.{index}")
    else:
        yield prefix, float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_model_is_the_same_model(name):
    entry = CONVERTED[name]
    arrays = {key: np.array(v) if isinstance(v, list) else v for key, v in entry["metadata"].items()}
    dims = {tensor: tuple(sizes) for tensor, sizes in entry["tensors"].items()}
    found = spec_from_gguf(arrays, dims, name)
    config = entry.get("config") or json.loads((GOLDEN / entry["folder"] / "config.json").read_text())
    golden = spec_from_config(config, name)
    for key, rope in golden.ropes.items():
        np.testing.assert_allclose(found.ropes[key].inverse_frequencies, rope.inverse_frequencies, rtol=1e-5)
        assert found.ropes[key].magnitude == pytest.approx(rope.magnitude)
        assert found.ropes[key].interleaved == rope.interleaved
    same = {"family": "", "ropes": {}, "max_position": 0}
    specs = [dict(flat(dataclasses.replace(spec, **same))) for spec in (found, golden)]
    differing = {key for key in specs[0].keys() | specs[1].keys() if specs[0].get(key) != specs[1].get(key)}
    assert all(OTHERWISE.get(name, set()) & set(key.split(".")) for key in differing), differing
    names, weights = family(found.family).gguf_names, weight_shapes(found)
    read = {weight for tensor in dims for weight in names.weights_of(tensor)}
    assert read == set(weights) - ({"lm_head.weight"} if found.tie_embeddings else set())
