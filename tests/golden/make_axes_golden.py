"""Makes logits of tiny random models with positions of three axes, by transformers in float32.

    pip install ckdist[golden] && python tests/golden/make_axes_golden.py

Each file tests/golden/axes/NAME.npz has the weights by name in float16 and
    rows        float32 (tokens, hidden): the inputs of the first layer; 2 x 3 patches of an image within text
    positions   int32 (tokens, 3)
    logits      float32 (tokens, vocab); the last DECODED tokens run one by one from the cache
"""

from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.cache_utils import DynamicCache
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

OUT = Path(__file__).parent / "axes"
SIZES = {
    "vocab_size": 60, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_sliding_window": False, "pad_token_id": None, "attn_implementation": "eager",
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}
BEFORE, HEIGHT, WIDTH, AFTER, DECODED = 5, 2, 3, 4, 3


def positions() -> np.ndarray:
    """Text, an image, text that goes on after the image's largest position: int32 (tokens, 3)."""
    image = [(BEFORE, BEFORE + y, BEFORE + x) for y in range(HEIGHT) for x in range(WIDTH)]
    after = BEFORE + max(HEIGHT, WIDTH)
    rows = [(i,) * 3 for i in range(BEFORE)] + image + [(after + i,) * 3 for i in range(AFTER + DECODED)]
    return np.array(rows, np.int32)


def write(name: str, model, sections: list[int]) -> None:
    torch.manual_seed(0)
    draw = lambda key, *shape: (0.2 * torch.randn(shape) + ("norm" in key)).half()  # norms multiply by about 1
    weights = {f"model.{key}": draw(key, *w.shape) for key, w in model.state_dict().items()}
    weights["lm_head.weight"] = draw("", SIZES["vocab_size"], SIZES["hidden_size"])
    model.load_state_dict({key.removeprefix("model."): w.float() for key, w in weights.items() if "lm_head" not in key})
    places = positions()
    rows = torch.randn(len(places), SIZES["hidden_size"])
    cache, hidden = DynamicCache(config=model.config), []
    ends = range(len(places) - DECODED, len(places) + 1)
    with torch.no_grad():
        for begin, end in zip([0, *ends], ends, strict=False):
            ids = torch.from_numpy(places[begin:end].T.astype(np.int64))[:, None]
            out = model(inputs_embeds=rows[None, begin:end], position_ids=ids, past_key_values=cache, use_cache=True)
            hidden.append(out.last_hidden_state[0])
        logits = torch.cat(hidden) @ weights["lm_head.weight"].float().T
    arrays = {key: w.numpy() for key, w in weights.items()}
    np.savez_compressed(OUT / f"{name}.npz", **arrays, rows=rows, positions=places, logits=logits, sections=sections)
    print(name, float(logits.abs().max()))


def main() -> None:
    OUT.mkdir(exist_ok=True)
    sections = [2, 3, 3]
    rope = {**ROPE, "mrope_section": sections}
    write("qwen2_5_vl", Qwen2_5_VLTextModel(Qwen2_5_VLTextConfig(**SIZES, rope_parameters=rope)).eval(), sections)
    sections = [4, 2, 2]
    rope = {**ROPE, "mrope_section": sections, "mrope_interleaved": True}
    config = Qwen3VLTextConfig(**SIZES, head_dim=16, attention_bias=False, rope_parameters=rope)
    write("qwen3_vl", Qwen3VLTextModel(config).eval(), sections)


if __name__ == "__main__":
    main()
