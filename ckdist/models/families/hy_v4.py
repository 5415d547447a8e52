"""Hunyuan 4: GLM-5.2's sparse latent attention with gates and sinks, and residual streams that are not mixed.

Neighbouring elements are rotated together, as its publisher computes it. The layer that predicts further tokens is left
out.
"""

from dataclasses import replace

from ckdist.models import hy_v4_gguf
from ckdist.models.compressed_model import LIMIT
from ckdist.models.families import deepseek_v2, deepseek_v32, glm_moe_dsa
from ckdist.models.fields import Fields
from ckdist.models.hy_v4_gguf import PARTS, gated_model
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import ModelSpec

KEYS = glm_moe_dsa.KEYS.but(
    defaults={
        "first_k_dense_replace": 1, "hc_eps": 1e-6, "hc_magnitude": 2.0, "hc_mult": 4, "index_n_heads": 16,
        "index_topk_freq": 4, "max_position_embeddings": 262144, "q_lora_rank": 1536, "routed_scaling_factor": 2.827,
    },
    only={
        "enable_ihc": True, "gated_mla": True, "gating_type": "elementwise", "learnable_sink": True,
        "rope_interleave": True, "swiglu_limit": LIMIT, "use_dsa": True, "use_mla": True,
    },
    unused=("bitwise_backward_align", "enable_lm_head_fp32", "indexer_rope_interleave", "learnable_sink_init",
            "mtp_loss_factor"),
)  # fmt: skip
HC = (("attn", "attn"), ("mlp", "ffn"))  # (name in files, name of weights)


def config(f: Fields, outer: Fields) -> ModelSpec:
    count, eps, factor = f.integer("hc_mult", high=8), f.number("hc_eps", high=1.0), f.number("hc_magnitude", high=1e3)
    streams = HyperConnections(count, 0, eps, apart=True, magnitude=factor)
    spec, indexer = deepseek_v2.model(f, outer), deepseek_v32.config_indexer(f)
    return gated_model(spec, f, indexer, glm_moe_dsa.indexer_layers(f), streams)


# As transformers 5.24 saves them, and as they are published
OF_LAYER = {"mlp.linear_gate": "mlp.gate_proj", "mlp.shared_experts.linear_gate": "mlp.shared_expert.gate_proj"}
OF_LAYER |= {"mlp.gate_proj": "mlp.gate_proj", "mlp.shared_experts.gate_proj": "mlp.shared_expert.gate_proj"}
for form in ("hc_pre.hc_{}_layer.hc_{}", "hc_{}_layer.hc_pre.hc_{}"):
    OF_LAYER |= {form.format(stored, part): f"{name}_hc.{part}" for stored, name in HC for part in PARTS}
OF_LAYER |= {"self_attn.linear_gate": "self_attn.g_proj", "self_attn.learnable_sink_param": "self_attn.sinks"}
HEAD = {f"model.{form}.hc_head_{part}": f"model.hc_head.hc_{part}"
        for form in ("hc_pre.hc_head", "hc_head") for part in PARTS}  # fmt: skip
FAMILY = replace(
    glm_moe_dsa.FAMILY,
    gguf="hy_v4",
    keys=KEYS,
    from_config=config,
    from_gguf=hy_v4_gguf.gguf,
    to_gguf=hy_v4_gguf.export,
    gguf_values=hy_v4_gguf.values,
    safetensors=deepseek_v2.SAFETENSORS.but_in_layers(OF_LAYER).but(HEAD),
    gguf_names=hy_v4_gguf.NAMES,
    ignored=deepseek_v2.FAMILY.ignored,
)
