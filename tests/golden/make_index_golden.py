"""Makes the output of a random layer of sparse latent attention, DeepSeek-V3.2's, by transformers in float32.

    pip install ckdist[golden] && python tests/golden/make_index_golden.py

tests/golden/index/deepseek_v32.npz has the weights by name in float16, `rows`, float32 (tokens, hidden), the input,
and `out`, float32 (tokens, hidden): TOP_K of up to TOKENS positions are seen.
"""

from pathlib import Path

import numpy as np
import torch
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

OUT = Path(__file__).parent / "index"
TOKENS, TOP_K = 70, 19


def main() -> None:
    OUT.mkdir(exist_ok=True)
    config = DeepseekV32Config(
        hidden_size=64, num_attention_heads=5, num_key_value_heads=5, q_lora_rank=36, kv_lora_rank=32,
        qk_rope_head_dim=16, qk_nope_head_dim=24, v_head_dim=20, index_n_heads=16, index_head_dim=24, index_topk=TOP_K,
        num_hidden_layers=1, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        attn_implementation="eager",
    )  # fmt: skip
    layer = DeepseekV32Attention(config, 0).eval()
    torch.manual_seed(0)
    draw = lambda key, w: (0.2 * torch.randn(w.shape) + ("norm.weight" in key)).half()
    weights = {key: draw(key, w) for key, w in layer.state_dict().items()}
    layer.load_state_dict({key: w.float() for key, w in weights.items()})
    rows = torch.randn(TOKENS, config.hidden_size)
    rotation = DeepseekV32RotaryEmbedding(config)(rows[None], torch.arange(TOKENS)[None])
    mask = torch.full((TOKENS, TOKENS), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        out = layer(rows[None], rotation, mask)[0][0]
    np.savez_compressed(
        OUT / "deepseek_v32.npz", **{key: w.numpy() for key, w in weights.items()}, rows=rows.numpy(), out=out.numpy()
    )
    print(float(out.abs().max()))


if __name__ == "__main__":
    main()
