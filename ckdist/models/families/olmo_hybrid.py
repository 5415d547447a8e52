"""OLMo hybrid: three layers of linear attention with norms before each part, then OLMo 2's attention.

New values of the delta rule have weights up to 2, so a state may change its sign. There is usually no rotation.
"""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, olmo2, qwen35
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.spec import LayerSpec, ModelSpec

PERIOD = 4
GATED_EPS = 1e-5  # of the norm after linear attention, independent of config.json
KEYS = olmo2.KEYS.but(
    defaults={
        **sizes(hidden=3840, ffn=11008, layers=32, heads=30, positions=65536, vocab=100352),
        "linear_allow_neg_eigval": True, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
    },
    nulls={"num_key_value_heads": None},
    only={"linear_use_gate": True},
    unused=("fla_hybrid_attention_indices", "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor",
            "linear_dt_max", "linear_dt_min"),
)  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    kinds = from_config.layer_kinds(f, n.num_layers, (qwen35.LINEAR, qwen35.FULL))
    linear = from_config.periodic(n.num_layers, PERIOD) if kinds is None else [one == qwen35.LINEAR for one in kinds]
    if all(linear) and kinds is None:
        linear[-1] = False
    keys = f.integer("linear_num_key_heads", n.num_heads)
    key_dim = f.integer("linear_key_head_dim", int(0.75 * n.hidden_size / keys))
    absent = {"num_key_heads": n.num_heads, "num_value_heads": n.num_heads, "key_head_dim": key_dim}
    absent["value_head_dim"] = 2 * key_dim
    of_net = {f"linear_{name}": f.integer(f"linear_{name}", value) for name, value in absent.items()}
    scale = 2.0 if f.flag("linear_allow_neg_eigval") else 1.0
    net = replace(qwen35.delta_net(f.but(of_net)), beta_scale=scale, norm_eps=GATED_EPS)
    scaling = f.sub("rope_parameters")
    rotates = scaling.has("rope_theta") or "rope_theta" not in scaling.values  # a base of null is for no rotation
    full, ffn = from_config.attention(f, n, qk_norm="row", rope="global" if rotates else None), from_config.dense(f)
    layers = [LayerSpec(net, ffn) if is_linear else LayerSpec(full, ffn, olmo2.NORMS) for is_linear in linear]
    return from_config.model(f, outer, n, layers)


PARTS = {f"linear_attn.{part}_proj": f"linear_attn.in_proj_{part}" for part in "qkvab"}
PARTS |= {"linear_attn.g_proj": "linear_attn.in_proj_z", "linear_attn.o_proj": "linear_attn.out_proj"}
PARTS |= {f"linear_attn.{part}_conv1d": f"linear_attn.conv1d_{part}" for part in "qkv"}
PARTS |= {"linear_attn.o_norm": "linear_attn.norm", "attention_layer_norm": "input_layernorm"}
PARTS |= {"feedforward_layer_norm": "post_attention_layernorm"}
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    to_gguf=GgufWriter(refused="serve its folder"),
    safetensors=family.SAFETENSORS.but_in_layers({**PARTS, "linear_attn.conv1d": qwen35.CONV}),
    gguf_names=family.GGUF,
)
