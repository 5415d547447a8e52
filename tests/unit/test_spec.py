"""ModelSpec from config.json and from GGUF metadata, against numbers that transformers computed
(golden/make_specs.py).
"""

import json

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.models.decoder import weight_shapes
from ckdist.models.registry import spec_from_config
from ckdist.models.rope import plain
from ckdist.models.rope_scaling import yarn
from ckdist.weights.checkpoint import open_checkpoint
from ckdist.weights.dequantize import read_tensor
from tests.support.paths import GOLDEN as GOLDEN_FILES

GOLDEN = json.loads((GOLDEN_FILES / "specs.json").read_text())
LLAMA = GOLDEN["llama"]["old"]


def assert_matches(spec, golden):
    rope = spec.ropes["global"]
    np.testing.assert_allclose(rope.inverse_frequencies, golden["inverse_frequencies"], rtol=1e-6)
    assert rope.inverse_frequencies.dtype == np.float32
    assert rope.magnitude == pytest.approx(golden["magnitude"])
    assert ("local" in spec.ropes) == (golden["local"] is not None)
    mixers = [layer.mixer for layer in spec.layers]
    if "local" in spec.ropes:
        np.testing.assert_allclose(spec.ropes["local"].inverse_frequencies, golden["local"], rtol=1e-6)
        assert all(mixer.rope == ("local" if mixer.window else "global") for mixer in mixers)
    assert [mixer.window for mixer in mixers] == golden["sliding"]
    assert {(mixer.soft_cap, spec.logit_soft_cap) for mixer in mixers} == {tuple(golden["caps"])}
    np.testing.assert_allclose([mixer.scale for mixer in mixers], golden["attention_scale"], rtol=1e-6)
    assert spec.tie_embeddings == golden["tied"]
    assert {name: list(shape) for name, shape in weight_shapes(spec).items()} == golden["shapes"]


@pytest.mark.parametrize("written", ["old", "new"])
@pytest.mark.parametrize("name", GOLDEN)
def test_config_as_transformers_reads_it(name, written):
    golden = GOLDEN[name]
    spec = spec_from_config(golden[written], "config.json")
    assert_matches(spec, golden)
    gemma = name.startswith("gemma")
    assert (spec.family, spec.max_position, spec.norm_eps) == (name.split("-")[0], 4096, 1e-5)
    assert {layer.ffn.activation for layer in spec.layers} == {"gelu_tanh" if gemma else "silu"}
    assert spec.embedding_scale == (8.0 if gemma else 1.0)


def test_yarn_of_a_short_context_as_in_transformers():
    """Dimension 0 rotates less than beta_fast times: the bound below 0 is clamped."""
    expected = [1.0, 0.1976424, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025, 7.905695e-05]
    np.testing.assert_allclose(yarn(plain(16, 1e4), 1e4, 4.0, 32, 32.0, 1.0), expected, rtol=1e-6)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES_GEMMA = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name, gemma):
    if name.startswith("model.layers."):
        _, _, i, rest = name.split(".", 3)
        stem, kind = rest.rsplit(".", 1)
        return f"blk.{i}.{(GGUF_NAMES_GEMMA if gemma else GGUF_NAMES)[stem]}.{kind}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]


def write_gguf(path, golden, architecture, rope_factors=None, drop=(), extra=(), **more):
    """A GGUF of the golden model as llama.cpp's converter writes it, with `extra` tensors; `more` are calls of the
    writer, None for none.
    """
    config = golden["old"]
    w = gguf.GGUFWriter(path, architecture)
    head_dim = config.get("head_dim", 16)
    calls = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": 64,
        "block_count": 7,
        "feed_forward_length": 96,
        "head_count": 4,
        "head_count_kv": 2,
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_freq_base": config.get("rope_theta", 10000.0),
    } | more
    for name, value in calls.items():
        if value is not None:
            getattr(w, f"add_{name}")(value)
    rng = np.random.default_rng(0)
    stored = {}
    for name, shape in golden["shapes"].items():
        x = stored[name] = rng.standard_normal(shape).astype(np.float32)
        if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
            heads = 4 if ".q_proj." in name else 2
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if name not in drop:
            w.add_tensor(gguf_name(name, architecture.startswith("gemma")), np.ascontiguousarray(x))
    if rope_factors is not None:
        w.add_tensor("rope_freqs.weight", rope_factors)
    for name in extra:
        w.add_tensor(name, np.ones(3, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return stored


YARN = gguf.RopeScalingType.YARN
LINEAR = gguf.RopeScalingType.LINEAR
GGUF_CASES = {
    "llama": {},
    "llama-bias": {},
    "llama-linear": {"rope_scaling_type": LINEAR, "rope_scaling_factor": 2.0},
    "qwen2": {},
    "qwen2-yarn": {"rope_scaling_type": YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 1024},
    "gemma3": {"sliding_window": 512, "rope_freq_base": 1e6},
    "gemma3-linear": {
        "sliding_window": 512,
        "rope_freq_base": 2e6,
        "rope_freq_base_swa": 2e4,
        "sliding_window_pattern": 3,
        "rope_scaling_type": LINEAR,
        "rope_scaling_factor": 8.0,
    },
    "mistral": {"sliding_window": 1024},
    "mistral-no-window": {},
}


@pytest.mark.parametrize("name", GGUF_CASES)
def test_gguf_means_the_same_as_the_config(tmp_path, name):
    golden = dict(GOLDEN[name])
    family = name.split("-")[0]
    if family == "gemma3":  # GGUF has no query_pre_attn_scalar; the models have it equal to head_dim
        golden["attention_scale"] = golden["old"]["head_dim"] ** -0.5
    more = dict(GGUF_CASES[name])
    pattern = more.pop("sliding_window_pattern", None)
    if pattern:
        more["sliding_window_pattern"] = pattern
    stored = write_gguf(tmp_path / "m.gguf", golden, "llama" if family == "mistral" else family, **more)
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert_matches(checkpoint.spec, golden)
    assert checkpoint.spec.family == ("llama" if family == "mistral" else family)
    for tensor, source in checkpoint.tensors.items():
        np.testing.assert_array_equal(
            read_tensor(source), stored.get(tensor, stored["model.embed_tokens.weight"]), err_msg=tensor
        )


def test_gguf_of_gemma2_takes_the_published_values(tmp_path):
    golden = GOLDEN["gemma2-no-caps"]
    write_gguf(tmp_path / "m.gguf", golden, "gemma2")
    expected = golden | {"caps": [50.0, 30.0], "attention_scale": 32**-0.5}
    assert_matches(open_checkpoint(tmp_path / "m.gguf").spec, expected)


def test_gguf_rope_factors_are_llama3s_scaling(tmp_path):
    golden = GOLDEN["llama-llama3"]
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    factors = (plain / golden["inverse_frequencies"]).astype(np.float32)
    write_gguf(tmp_path / "m.gguf", golden, "llama", factors)
    assert_matches(open_checkpoint(tmp_path / "m.gguf").spec, golden)
    write_gguf(tmp_path / "m.gguf", golden, "llama", factors[:5])
    with pytest.raises(ModelFileError, match=r"rope_freqs.weight has shape \(5,\); heads of 128 need \(64,\)"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_that_is_not_such_a_model(tmp_path):
    path, golden = tmp_path / "m.gguf", GOLDEN["llama"]
    for message, error, architecture, more in [
        ("'bloom' is not known, and no known one has a similar name", ArchitectureError, "bloom", {}),
        ("qwen2.expert_count is 8; it must be 0: qwen2 has no experts", ModelFileError, "qwen2", {"expert_count": 8}),
        (
            "a token takes 9 experts, but there are 8",
            ModelFileError,
            "llama",
            {"expert_count": 8, "expert_used_count": 9, "expert_feed_forward_length": 32},
        ),
        (
            "llama.rope.dimension_count is 8; it must be the same as the heads' size, 16",
            ModelFileError,
            "llama",
            {"rope_dimension_count": 8},
        ),
        ("llama.block_count is missing", ModelFileError, "llama", {"block_count": None}),
        (
            "llama.block_count is 2000; it must be a whole number from 1 to 1024",
            ModelFileError,
            "llama",
            {"block_count": 2000},
        ),
        (
            "scaling 'longrope' is not known; the known ones are",
            ModelFileError,
            "llama",
            {"rope_scaling_type": gguf.RopeScalingType.LONGROPE},
        ),
        ("4 attention heads cannot share 3 kv-heads", ModelFileError, "llama", {"head_count_kv": 3}),
        (
            "feed_forward_length is .*the same in every layer",
            ModelFileError,
            "llama",
            {"feed_forward_length": [96] * 6 + [64]},
        ),
        (
            "'model.layers.0.mlp.gate_proj.weight' has shape .96, 64., but the model needs .80, 64.",
            ModelFileError,
            "llama",
            {"feed_forward_length": 80},
        ),
    ]:
        write_gguf(path, golden, architecture, **more)
        with pytest.raises(error, match=message):
            open_checkpoint(path)
    write_gguf(path, golden, "llama", drop=["model.layers.3.input_layernorm.weight"])
    with pytest.raises(ModelFileError, match=r"'model.layers.3.input_layernorm.weight' of shape \(64,\) is missing"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"architectures": ["BloomForCausalLM"]},
            "'BloomForCausalLM' is not known, and no known one has a similar name; docs/families.md lists them all",
        ),
        (
            {"architectures": ["Qwen4ForCausalLM"], "index_topk": 2048, "hc_mult": 4},
            "Qwen3ForCausalLM, Qwen2ForCausalLM, .* does not have these fields: index_topk is 2048, hc_mult is 4$",
        ),
        (
            {"architectures": ["MixtralXForCausalLM"]},
            "the nearest known are MixtralForCausalLM, .*; MixtralForCausalLM cannot read the file: num_local_experts",
        ),
        ({"architectures": []}, "architectures is \\[\\]; it must be a list of names"),
        (
            {"architectures": None, "model_type": "qwen"},
            "'qwen' is not known; the nearest known are qwen3, qwen2, qwen3_5",
        ),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it must be a whole number from 1 to 1024"),
        ({"num_hidden_layers": 1025}, "from 1 to 1024"),
        ({"num_hidden_layers": "7"}, "num_hidden_layers is '7'"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 1 << 21}, "whole number from 1 to 1048576"),
        ({"hidden_size": 66}, "hidden_size is 66; it must be divisible by num_attention_heads \\(4\\)"),
        ({"head_dim": 15}, "head_dim is 15; it must be even"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 kv-heads evenly"),
        ({"vocab_size": 1e99}, "vocab_size is 1e\\+99"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
        ({"rope_theta": 0.5}, "rope_theta is 0.5; it must be a number above 1"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; it must be one of silu"),
        (
            {"rope_scaling": {"type": "ntk", "factor": 2.0}},
            "scaling 'ntk' is not known; the known ones are default, mrope, linear, dynamic, llama3, yarn, longrope",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.short_factor is missing"),
        (
            {"rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 7, "long_factor": [1] * 8}},
            "short_factor is .*a list of 8 numbers",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4]}}, "mrope_section is .*a list of 3 numbers"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4, 1]}}, "three numbers with the sum 8, the pairs"),
        ({"rope_scaling": [1]}, "rope_scaling is \\[1\\]; it must be an object"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
            "at most high_freq_factor, which is 1",
        ),
        (
            {"architectures": ["Glm4ForCausalLM"], "head_dim": 16, "partial_rotary_factor": 0.2},
            "partial_rotary_factor is 0.2; it must be such that an even number of the 16",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention"],
            },
            "a list of 7",
        ),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "must be false"),
    ],
)
def test_config_that_cannot_be(fields, message):
    with pytest.raises((ArchitectureError, ModelFileError), match=message) as e:
        spec_from_config(LLAMA | fields, "config.json")
    assert str(e.value).startswith("config.json: ") and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "rope, runs",
    [
        # Qwen2-VL and Qwen2.5-VL: consecutive pairs
        ({"type": "mrope", "mrope_section": [16, 24, 24]}, "0" * 16 + "1" * 24 + "2" * 24),
        # Qwen3-VL: in turns, then time alone
        (
            {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
            "012" * 20 + "0" * 4,
        ),
    ],
)
def test_the_axis_of_each_pair_of_published_models(rope, runs):
    spec = spec_from_config(LLAMA | {"head_dim": 128, "rope_scaling": rope}, "config.json")
    assert "".join(map(str, spec.ropes["global"].axes)) == runs
    assert spec.ropes["global"].dims == 128


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "full_attention"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=200, deadline=2000)
@given(
    st.sampled_from(sorted(GOLDEN)),
    st.sampled_from(["old", "new"]),
    st.dictionaries(
        st.sampled_from([*sorted(GOLDEN["gemma3"]["new"]), "rope_scaling", "rope_theta", "text_config"]),
        JUNK,
        min_size=1,
        max_size=3,
    ),
    st.dictionaries(
        st.sampled_from(["factor", "rope_theta", "beta_fast", "beta_slow", "original_max_position_embeddings"]),
        JUNK | st.floats(0, 1e12),
    ),
)
def test_any_config_is_read_or_refused(name, written, fields, scaling):
    config = GOLDEN[name][written] | fields
    if isinstance(config.get("rope_scaling"), dict):
        config["rope_scaling"] = config["rope_scaling"] | scaling
    try:
        spec = spec_from_config(config, "config.json")
    except (ArchitectureError, ModelFileError) as e:
        assert "\n" not in str(e)
        return
    assert all(np.isfinite(rope.inverse_frequencies).all() for rope in spec.ropes.values())


@pytest.mark.parametrize(
    "name",
    [
        "output.bias",
        "blk.0.ffn_down.bias",
        "blk.3.attn_sub_norm.weight",
        "blk.0.attn_norm.bias",
        "blk.7.attn_q.weight",
        "blk.00.attn_q.weight",
        "blk.2.attn_q.scale",
        "cls.output.weight",
        "rope_factors_long.weight",
        "token_types.weight",
        "blk.1.nextn.eh_proj.weight",
    ],
)
def test_gguf_tensors_that_nothing_reads_are_named(tmp_path, name):
    write_gguf(tmp_path / "m.gguf", GOLDEN["llama"], "llama", extra=[name])
    with pytest.raises(ModelFileError, match=f"m.gguf: '{name}' has no place in a llama model of 7 layers"):
        open_checkpoint(tmp_path / "m.gguf")


def test_gguf_tensors_that_change_no_answer_are_noted(tmp_path):
    write_gguf(
        tmp_path / "m.gguf",
        GOLDEN["gemma3"],
        "gemma3",
        sliding_window=512,
        rope_freq_base=1e6,
        extra=["v.blk.0.attn_q.weight", "mm.0.weight", "blk.1.attn_rot_embd.weight"],
    )
    assert open_checkpoint(tmp_path / "m.gguf").notes == (
        "images are not read: 2 tensors, as 'v.blk.0.attn_q.weight', stay unused",
    )


HYBRID = {name: json.loads((GOLDEN_FILES / name / "config.json").read_text()) for name in ("qwen35", "qwen3next")}


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(HYBRID)),
    st.dictionaries(
        st.sampled_from(sorted({*HYBRID["qwen35"], *HYBRID["qwen3next"]} - {"architectures"})),
        JUNK | st.lists(st.sampled_from(["linear_attention", "full_attention"]), max_size=5),
        min_size=1,
        max_size=3,
    ),
)
def test_any_config_of_linear_attention_is_read_or_refused(name, fields):
    try:
        spec = spec_from_config(HYBRID[name] | fields, "here")
    except (ArchitectureError, ModelFileError) as error:
        assert str(error).startswith("here") and "\n" not in str(error)
        return
    assert spec.layers


@pytest.mark.parametrize(
    "fields, said",
    [
        ({"linear_num_value_heads": 7}, "7 value heads of linear attention cannot share 3 key heads evenly"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1; it must be a whole number from 2 to 16"),
        ({"layer_types": ["full_attention"]}, "it must be a list of 4 of linear_attention and full_attention"),
        ({"attn_output_gate": False}, "attn_output_gate is False; it must be true"),
    ],
)
def test_linear_attention_that_does_not_fit(fields, said):
    with pytest.raises(ModelFileError, match=said):
        spec_from_config(HYBRID["qwen35"] | fields, "here")
