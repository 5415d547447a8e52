"""DeepSeek's and Kimi's configurations, as they are published, and damaged ones."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckdist.errors import ArchitectureError, ModelFileError
from ckdist.models.registry import spec_from_config
from ckdist.models.spec import DenseFfn, LatentAttention, MoeFfn
from ckdist.program.cache import block_bytes
from ckdist.program.routing import Routing
from tests.support.caches import caches_of

YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64, "routed_scaling_factor": 1.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
    "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "rope_theta": 10000, "attention_bias": False,
    "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "tie_word_embeddings": False,
}  # fmt: skip
V3 = {
    **V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1, "n_routed_experts": 256,
    "routed_scaling_factor": 2.5, "q_lora_rank": 1536, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4,
    "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "scoring_func": "sigmoid",
    "num_nextn_predict_layers": 1, "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
K2 = {
    **V3, "model_type": "kimi_k2", "vocab_size": 163840, "num_attention_heads": 64, "num_key_value_heads": 64,
    "n_routed_experts": 384, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "max_position_embeddings": 262144, "rope_theta": 50000.0, "num_nextn_predict_layers": 0,
    "rope_scaling": {**YARN, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0}, "rms_norm_eps": 1e-5,
}  # fmt: skip
K25 = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": K2}


def test_published_numbers():
    lite = spec_from_config(V2_LITE, "lite")
    a = lite.layers[0].mixer
    scale = 192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2
    assert a == LatentAttention(16, 512, 128, 64, 128, pytest.approx(scale), 0, norm_eps=1e-6)
    assert lite.ropes["global"].magnitude == pytest.approx(1.0) and lite.ropes["global"].interleaved
    assert lite.layers[0].ffn == DenseFfn(10944)
    experts = Routing(6, "softmax", renormalise=False, scale=1.0, group_scores=1)
    assert {layer.ffn for layer in lite.layers[1:]} == {MoeFfn(64, 1408, experts, shared_size=2816)}
    v3 = spec_from_config(V3, "v3")
    experts = Routing(8, "sigmoid", renormalise=True, scale=2.5, groups=8, top_groups=4)
    assert v3.layers[3].ffn == MoeFfn(256, 2048, experts, correction_bias=True, shared_size=2048)
    assert [isinstance(layer.ffn, DenseFfn) for layer in v3.layers].count(True) == 3 and len(v3.layers) == 61
    assert (v3.layers[0].mixer.q_lora_rank, v3.layers[0].mixer.num_heads) == (1536, 128)


def test_kimi():
    by_type = {name: value for name, value in K2.items() if name != "architectures"}
    text, alone, published = (spec_from_config(config, "kimi") for config in (K25, by_type, K2))
    assert {text.family, alone.family, published.family} == {"kimi_k2"}
    assert text.layers == alone.layers == published.layers and len(text.layers) == 61
    assert text.layers[1].ffn.routing == Routing(8, "sigmoid", renormalise=True, scale=2.827)
    assert text.layers[1].ffn.num_experts == 384 and isinstance(text.layers[0].ffn, DenseFfn)


@pytest.mark.parametrize("kind, each", [("f16", 1152), ("i16", 1160), ("q8_0", 612), ("f32", 2304)])
def test_the_cache_holds_the_latent_vectors_alone(kind, each):
    spec = spec_from_config(V2_LITE, "lite")
    assert block_bytes(caches_of(spec), (kind, "f32")) == 27 * -(-16 * each // 64) * 64


DAMAGED = [
    ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
    ({"kv_lora_rank": 36}, "kv_lora_rank is 36; it must be a multiple of 8"),
    ({"kv_lora_rank": 1 << 20}, "kv_lora_rank is 1048576"),
    ({"q_lora_rank": 0}, "q_lora_rank is 0"),
    ({"qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
    ({"qk_rope_head_dim": 6}, "qk_rope_head_dim is 6; it must be a multiple of 8"),
    ({"qk_nope_head_dim": -1}, "qk_nope_head_dim is -1"),
    ({"v_head_dim": 1.5}, "v_head_dim is 1.5"),
    ({"attention_bias": True}, "attention_bias is True"),
    ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    ({"topk_method": "best"}, "topk_method is 'best'"),
    ({"scoring_func": "relu"}, "scoring_func is 'relu'"),
    ({"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0"),
    ({"num_experts_per_tok": 300}, "300"),
    ({"n_group": 7}, "7"),
]


@pytest.mark.parametrize("change, message", DAMAGED, ids=lambda value: str(value)[:30])
def test_damaged_configs_end_in_one_line(change, message):
    with pytest.raises(ModelFileError, match=message) as caught:
        spec_from_config({**V3, **change}, "config.json")
    assert "\n" not in str(caught.value)


JUNK = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
)


@settings(max_examples=150, deadline=2000)
@given(st.sampled_from([V2_LITE, V3, K2]), st.dictionaries(st.sampled_from(sorted(V3)), JUNK, min_size=1, max_size=3))
def test_any_config_is_read_or_refused(config, changes):
    try:
        spec = spec_from_config({**config, **changes}, "config.json")
    except (ModelFileError, ArchitectureError) as error:
        assert str(error).startswith("config.json: ")
    else:
        assert replace(spec).layers
