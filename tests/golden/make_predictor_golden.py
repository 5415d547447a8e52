"""Makes the logits of layers that predict tokens, by transformers in float32: tests/golden/predictors/FAMILY.npy.

    pip install ckdist[golden] && python tests/golden/make_predictor_golden.py

The layer is a transformers model of one layer on inputs W [norm(e); norm(h)] (arXiv:2412.19437, section 2.2), with the
embeddings e of the tokens 1 to 63 of the golden ids, and the last hidden states h of the tokens before them. The model
is `tests.support.predictors.with_predictor` of the family's golden model.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.support.predictors import MIMO, MIMO_7B, QWEN, read, with_predictor

GOLDEN = Path(__file__).parent
ROWS = 16  # the last ones are kept


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def stacked(tensors: dict[str, torch.Tensor], layer: int) -> dict[str, torch.Tensor]:
    """Tensors of a layer in the names of a model of one layer."""
    return {
        f"model.layers.0.{n.split('.', 3)[3]}": t for n, t in tensors.items() if n.startswith(f"model.layers.{layer}.")
    }


def main() -> None:
    (GOLDEN / "predictors").mkdir(exist_ok=True)
    for family in sys.argv[1:] or ("deepseek_v3", "glm4moe", "qwen3next", "mimo_v2_flash", "qwen2", "dots3_note"):
        with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
            folder = with_predictor(GOLDEN / family, Path(temporary))
            config = AutoConfig.from_pretrained(GOLDEN / family)
            model = AutoModelForCausalLM.from_pretrained(GOLDEN / family, dtype=torch.float32).eval()
            ids = torch.from_numpy(np.load(GOLDEN / family / "ids.npy").astype(np.int64))[None]
            hidden = model.model(ids).last_hidden_state
            own = {n: torch.from_numpy(t.copy()) for n, t in read(folder / "model.safetensors").items()}
            is_qwen, count = "qwen3" in config.model_type, config.num_hidden_layers
            is_mimo, is_dots = family == "mimo_v2_flash", family == "dots3_note"
            root = "mtp" if is_qwen else "model.mtp.layers.0" if is_mimo else f"model.layers.{count}"
            names = QWEN if is_qwen else MIMO if is_mimo else {}
            if family == "qwen2":  # as MiMo-7B
                root, names = "model.mtp_layers.0", MIMO_7B
            get = lambda name: own[f"{root}.{names.get(name, name)}.weight"] + 0.0
            plus, eps = float(is_qwen), config.rms_norm_eps
            embed = own["model.mtp.embed_tokens.weight"] if is_dots else model.model.embed_tokens.weight
            parts = [
                normed(embed[ids[:, 1:]], get("enorm") + plus, eps),
                normed(hidden[:, :-1], get("hnorm") + plus, eps),
            ]
            x = torch.cat(parts[::-1] if family == "qwen2" else parts, -1) @ get("eh_proj").T
            single = AutoConfig.from_pretrained(GOLDEN / family, num_hidden_layers=1)
            single.first_k_dense_replace, single.mlp_only_layers = 0, []
            if is_qwen:
                single.layer_types = ["full_attention"]
            elif family != "qwen2":
                single.mlp_layer_types = ["dense" if is_mimo else "sparse"]
            if is_mimo:
                single.layer_types = ["sliding_attention"]
            if is_dots:
                fields = json.loads((GOLDEN / family / "config.json").read_text()) | {"num_hidden_layers": 1}
                fields |= {"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}
                single = type(config)(**fields)
            layer = AutoModelForCausalLM.from_config(single, dtype=torch.float32).eval()
            state = layer.state_dict()
            whole = stacked(model.state_dict(), count - 1)
            if is_mimo or is_dots:  # the attention of the sliding layer, and the feed-forward of the dense one
                whole = {n: t for n, t in stacked(model.state_dict(), 0).items() if ".mlp." in n or is_mimo} | {
                    n: t for n, t in stacked(model.state_dict(), 1).items() if ".mlp." not in n
                }
            missing = [n for n in state if n.startswith("model.layers.0.") and n not in whole]
            assert not missing, missing
            state |= whole | {"lm_head.weight": model.lm_head.weight, "model.norm.weight": get("shared_head.norm")}
            layer.load_state_dict(state)
            logits = layer(inputs_embeds=x).logits[0, -ROWS:]
            np.save(GOLDEN / "predictors" / f"{family}.npy", logits.numpy())
            print(family, logits.shape, float(logits.abs().max()))


if __name__ == "__main__":
    main()
