"""Tiny models with a layer that predicts tokens: a golden model, whose last layer is that layer, too."""

import json
import re
import struct
from pathlib import Path

import numpy as np

MIMO = {"shared_head.norm": "final_layernorm", "post_attention_layernorm.weight": "pre_mlp_layernorm.weight"}
MIMO_7B = {
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "eh_proj": "input_proj",
    "shared_head.norm": "final_layernorm",
}
QWEN = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "shared_head.norm": "norm"}
HEADER = 8


def read(path: Path) -> dict[str, np.ndarray]:
    """All float32 tensors of a safetensors file."""
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:HEADER])
    header, begin = json.loads(data[HEADER : HEADER + size]), HEADER + size
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data, "<f4", int(np.prod(t["shape"])), begin + t["data_offsets"][0]).reshape(t["shape"])
        for name, t in header.items()
    }


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, at = {}, 0
    for name, values in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    blobs = [np.ascontiguousarray(values, "<f4").tobytes() for values in tensors.values()]
    path.write_bytes(b"".join([struct.pack("<Q", len(text)), text, *blobs]))


def own_weights(hidden: int, zero: float) -> dict[str, np.ndarray]:
    """The weights that only such a layer has. `zero`: stored value of a norm's weight of 1, minus 1."""
    draw = np.random.RandomState(3)
    norm = lambda: (1 + zero + 0.2 * draw.standard_normal(hidden)).astype(np.float32)
    proj = (draw.standard_normal((hidden, 2 * hidden)) / np.sqrt(hidden)).astype(np.float32)
    return {"enorm": norm(), "hnorm": norm(), "eh_proj": proj, "shared_head.norm": norm()}


def with_predictor(golden: Path, folder: Path, follows: bool = False) -> Path:
    """Writes the golden model with such a layer.

    Args:
        follows: Layers add little, and the layer's input is the next token's embedding. So most of its tokens are
            those of the model.
    """
    config = json.loads((golden / "config.json").read_text())
    layers, hidden, kind = config["num_hidden_layers"], config["hidden_size"], config["model_type"]
    is_qwen, is_mimo, is_mimo_7b, is_dots = "qwen3" in kind, "mimo" in kind, kind == "qwen2", "dots3" in kind
    tensors, zero = read(golden / "model.safetensors"), -float(is_qwen)
    root = "model.mtp.layers.0." if is_mimo else "mtp.layers.0." if is_qwen else f"model.layers.{layers}."
    root = "model.mtp_layers.0." if is_mimo_7b else root
    names = MIMO if is_mimo else MIMO_7B if is_mimo_7b else {}
    last = {n: t for n, t in tensors.items() if n.startswith(f"model.layers.{layers - 1}.")}
    if is_mimo or is_dots:  # the attention of its sliding layer, and the feed-forward of its dense layer
        last = {n: t for n, t in tensors.items() if n.startswith("model.layers.1.") and ".mlp." not in n}
        last |= {n: t for n, t in tensors.items() if n.startswith("model.layers.0.mlp.")}
    parts = {name.split(".", 3)[3]: values for name, values in last.items()}
    tensors |= {f"{root}{names.get(name, name)}": values for name, values in parts.items()}
    own = own_weights(hidden, zero)
    if follows:
        adds = re.compile(r".*\.(o_proj|out_proj|down_proj)\.weight")
        tensors = {name: t * np.float32(0.03 if adds.fullmatch(name) else 1) for name, t in tensors.items()}
        own["eh_proj"] = np.concatenate([np.eye(hidden), np.zeros((hidden, hidden))], 1).astype(np.float32)
        own |= {name: np.full(hidden, 1 + zero, np.float32) for name in ("enorm", "hnorm")}
        own["shared_head.norm"] = tensors["model.norm.weight"]
    if is_dots:
        embed = tensors["model.embed_tokens.weight"]
        noise = np.random.RandomState(4).standard_normal(embed.shape).astype(np.float32)
        tensors["model.mtp.embed_tokens.weight"] = embed + np.float32(0.02) * noise
    if is_mimo_7b:
        config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "use_mrope": False}
        own["eh_proj"] = np.roll(own["eh_proj"], hidden, 1)  # its first half reads the row
    for name, values in own.items():
        tensors[f"mtp.{QWEN[name]}.weight" if is_qwen else f"{root}{names.get(name, name)}.weight"] = values
    config["num_nextn_predict_layers"] = 1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write(folder / "model.safetensors", tensors)
    return folder
