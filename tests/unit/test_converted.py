"""GGUF metadata as llama.cpp's converter (b11434) writes it of the golden models: one spec, and every tensor is read.

configs/converted.json has the metadata, and the tensors' names and dimensions. Entry `large3` is the model of
`mistral4` in the form of Mistral Large 3: params.json and consolidated.safetensors, which the converter reads as
deepseek2. Entry `deepseek_v4` has a config of its own, since GGUF has only windows of 4 and 128 tokens; its metadata is
that of a file that llama.cpp loads and whose logits are those of transformers.
"""

import contextlib
import dataclasses
import json

import numpy as np
import pytest

from ckdist.errors import CkdistError
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import family, read_gguf_metadata, spec_from_config
from tests.support.cases import cases
from tests.support.paths import GOLDEN

CONVERTED = json.loads((GOLDEN / "configs" / "converted.json").read_text())
# Fields that GGUF says otherwise: norms of low ranks have the model's epsilon there, groups of one have no scores, and
# GLM-4.7-Flash and Granite 4 have the names of other families. llama.cpp does not scale Mistral Small 4's queries, so
# its files have no numbers for that, and the published ones are assumed.
OTHERWISE = {
    **{key: {"norm_eps"} for key in ("deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "hy_v4", "kimi_linear")},
    **{key: {"norm_eps"} for key in ("deepseek_v2", "deepseek_v3", "youtu")},
    "kimi_k3": {"normed"},  # its scores have one vector
    "mistral4": {"query_scale"},
    "large3": {"group_scores"},
    "qwen4_exp": {"rows", "parts", "tiled"},  # the table of n-grams is one tensor, and value heads have another order
}


def spec_from_gguf(metadata, dims, where):
    return read_gguf_metadata(metadata, dims, where)[0]


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


def arrays(metadata: dict) -> dict:
    return {key: np.array(value) if isinstance(value, list) else value for key, value in metadata.items()}


def golden_spec(folder: str):
    return spec_from_config(json.loads((GOLDEN / folder / "config.json").read_text()), folder)


@cases("name", CONVERTED)
def test_a_converted_model_is_the_same_model(name):
    entry = CONVERTED[name]
    dims = {tensor: tuple(sizes) for tensor, sizes in entry["tensors"].items()}
    found, unknown = read_gguf_metadata(arrays(entry["metadata"]), dims, name)
    assert not unknown
    golden = spec_from_config(entry["config"], name) if "config" in entry else golden_spec(entry["folder"])
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


@pytest.mark.parametrize(
    "name, value, allowed",
    [("attention.causal", False, "true"), ("logit_scale", 0.5, "0 or 1"), ("attention.clamp_kqv", 8.0, "0")],
)
def test_a_field_that_the_family_does_not_read_must_change_nothing(name, value, allowed):
    entry = CONVERTED["qwen3"]
    metadata, dims = arrays(entry["metadata"]), {tensor: tuple(sizes) for tensor, sizes in entry["tensors"].items()}
    for neutral in (allowed == "true", int(allowed[-1] == "1")):
        if (name == "attention.causal") == (type(neutral) is bool):
            assert not read_gguf_metadata({**metadata, f"qwen3.{name}": neutral}, dims, "it")[1]
    with pytest.raises(
        CkdistError, match=rf"^it: qwen3\.{name} is {value}; it must be {allowed}: another value is not"
    ):
        read_gguf_metadata({**metadata, f"qwen3.{name}": value}, dims, "it")
    more = {"qwen3.vision.block_count": 27, "qwen3.of_later": np.array([3, 4]), "general.of_later": 1}
    assert read_gguf_metadata({**metadata, **more}, dims, "it")[1] == ["qwen3.of_later is [3, 4]"]


def test_the_magnitude_of_olmo_3_has_two_spellings():
    """Both are the `attention_factor` of its config.json, as is the magnitude that YaRN has by itself."""
    metadata, name = arrays(CONVERTED["olmo3"]["metadata"]), "olmo2.rope.scaling.{}"
    factor, dims = metadata.pop(name.format("yarn_attn_factor")), {"token_embd.weight": (64, 221)}
    for more in ({}, {name.format("attn_factor"): factor}, {name.format("yarn_attn_factor"): factor}):
        found = spec_from_gguf({**metadata, **more}, dims, "olmo3")
        assert found.ropes["global"].magnitude == pytest.approx(factor)
        assert found.ropes["local"].magnitude == 1.0
    with pytest.raises(CkdistError, match=r"yarn_ext_factor is 0\.5; it must be 1\.0"):
        spec_from_gguf({**metadata, name.format("yarn_ext_factor"): 0.5}, dims, "olmo3")


def test_deepseek_v4_is_written_as_llama_cpp_reads_it():
    """Tables are matrices in the file. What GGUF cannot describe is refused in a line."""
    entry = CONVERTED["deepseek_v4"]
    spec = spec_from_config(entry["config"], "it")
    of = family(spec.family)
    assert of.gguf_form(spec, "it").metadata == entry["metadata"]
    weights = weight_shapes(spec)
    for stored, (weight,) in of.gguf_names.stored(weights).items():
        if len(weights[weight]) == 1:
            shape = of.gguf_values(spec, weight, np.zeros(weights[weight])).shape
            assert list(shape[::-1]) == entry["tensors"][stored], stored
    with pytest.raises(CkdistError, match=r"^it: deepseek_v4 with other compress_rates has no GGUF form$"):
        of.gguf_form(golden_spec("deepseek_v4"), "it")


def test_glm_5_3_flash_has_two_architectures():
    """The files of the first converters are called otherwise, do not say that all indexers are full, and predict."""
    metadata = {key.replace("5-next", "5next"): value for key, value in CONVERTED["glm5_next"]["metadata"].items()}
    metadata |= {"general.architecture": "glm5next", "glm5next.block_count": 4, "glm5next.nextn_predict_layers": 1}
    metadata["glm5next.attention.head_count_kv"] = [0, 1, 0, 1]
    for name in ("types", "kpool_select_tail"):
        del metadata[f"glm5next.attention.indexer.{name}"]
    arrays = {key: np.array(value) if isinstance(value, list) else value for key, value in metadata.items()}
    found = spec_from_gguf(arrays, {name: tuple(d) for name, d in CONVERTED["glm5_next"]["tensors"].items()}, "it")
    assert found.layers == golden_spec("glm5_next").layers


WRONG = [0, -1, 1 << 70, True, "x", [["a"], [1]], 0.5, float("nan")]
WRONG += [np.array(values) for values in ([], [1, 2, 3, 4], [np.nan] * 4, [True] * 4, ["a"] * 4)]


@pytest.mark.parametrize("name", ["afmoe", "exaone_moe", "glm4moe"])
def test_layers_that_predict_further_tokens_are_left_out(name):
    plain = family(name).gguf_form(golden_spec(name), name).metadata
    prefix, longer = plain["general.architecture"], dict(plain)
    longer |= {f"{prefix}.block_count": plain[f"{prefix}.block_count"] + 1, f"{prefix}.nextn_predict_layers": 1}
    if flags := plain.get(pattern := f"{prefix}.attention.sliding_window_pattern"):
        longer[pattern] = [*flags, False]
    specs = [
        spec_from_gguf(
            arrays(one),
            {"token_embd.weight": (24, 96)}, name,
        )
        for one in (plain, longer)
    ]  # fmt: skip
    assert specs[0].layers == specs[1].layers


HEADERS = """deepseek_v32 deepseek_v4 dots1 ernie4_5_moe falcon_mamba gemma3n gemma4 glm4_moe_lite glm_moe_dsa granite4h
granitemoe hunyuan_v1_moe kimi_linear laguna large3 lfm2 minimax_m3 mistral4 olmo3 qwen3vlmoe qwen4_exp"""


@pytest.mark.parametrize("name", HEADERS.split())
def test_a_wrong_header_is_refused_in_a_line(name):
    if name in CONVERTED:
        metadata = CONVERTED[name]["metadata"]
        dims = {tensor: tuple(sizes) for tensor, sizes in CONVERTED[name]["tensors"].items()}
    else:
        metadata = family(name).gguf_form(golden_spec(name), name).metadata
        dims = {"token_embd.weight": (24, 100), "blk.0.laurel_l.weight": (24, 6), "per_layer_token_embd.weight": (8, 9)}
    metadata = arrays(metadata)
    right = spec_from_gguf(metadata, dims, name)
    weight_shapes(right)
    once = {tensor.replace("blk.1.", "blk.0."): tensor for tensor in dims}.values()
    headers = [({**metadata, key: value}, dims) for key in metadata if "." in key[8:] for value in WRONG]
    headers += [({key: metadata[key] for key in metadata if key != absent}, dims) for absent in metadata]
    headers += [(metadata, {**dims, tensor: sizes}) for tensor in once for sizes in ((), (8,), (8, 8, 8))]
    for found, sizes in headers:
        with contextlib.suppress(CkdistError):
            spec = spec_from_gguf(found, sizes, name)
            if spec != right or spec.ropes.keys() != right.ropes.keys():
                weight_shapes(spec)
