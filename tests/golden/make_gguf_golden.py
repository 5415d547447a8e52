"""Makes the golden GGUF files whose types llama.cpp quantises with an importance matrix, and their logits.

    python tests/golden/make_gguf_golden.py files   (needs llama-cpp-python and gguf)
    python tests/golden/make_gguf_golden.py logits  (needs transformers, torch and gguf)

`files` quantises every matrix of tests/golden/gguf/F16.gguf by ggml's own function, all columns of the same importance.
`logits` gives the matrices, dequantised by the gguf package, to transformers: float32 (90, 512), of the ids in ids.npy.
"""

import ctypes
import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

OUT = Path(__file__).parent / "gguf"
TYPES = ["IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "MXFP4", "TQ1_0", "TQ2_0"]
NAMES = {  # of a layer's tensors: GGUF's and transformers'
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm", "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def quantised(ggml, values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    values = np.ascontiguousarray(values, np.float32)
    rows, cols = values.shape
    elements, size = quants.GGML_QUANT_SIZES[kind]
    out = np.zeros((rows, cols // elements * size), np.uint8)
    importance = np.ones(cols, np.float32)
    float_pointer = ctypes.POINTER(ctypes.c_float)
    arguments = (
        int(kind),
        values.ctypes.data_as(float_pointer),
        ctypes.c_void_p(out.ctypes.data),
        ctypes.c_int64(0),
        ctypes.c_int64(rows),
        ctypes.c_int64(cols),
    )
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    assert ggml.ggml_quantize_chunk(*arguments, importance.ctypes.data_as(float_pointer)) == out.nbytes
    return out


def write(reader: GGUFReader, ggml, kind: GGMLQuantizationType) -> None:
    writer = GGUFWriter(OUT / f"{kind.name}.gguf", "qwen3")
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            many = field.types[0] == GGUFValueType.ARRAY
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=field.types[-1] if many else None)
    for tensor in reader.tensors:
        if len(tensor.shape) == 2:
            values = quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, quantised(ggml, values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, tensor.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_of(path: Path) -> np.ndarray:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    reader = GGUFReader(path)
    key = {
        name.removeprefix("qwen3."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith("qwen3.")
    }
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        name = {"output": "lm_head", "output_norm": "model.norm", "token_embd": "model.embed_tokens"}.get(
            parts[0]
        ) or f"model.layers.{parts[1]}.{NAMES[parts[2]]}"
        weights[f"{name}.weight"] = torch.from_numpy(
            np.array(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        )
    config = Qwen3Config(
        vocab_size=len(weights["lm_head.weight"]), hidden_size=key["embedding_length"], intermediate_size=key["feed_forward_length"],
        num_hidden_layers=key["block_count"], num_attention_heads=key["attention.head_count"], head_dim=key["attention.key_length"],
        num_key_value_heads=key["attention.head_count_kv"], rms_norm_eps=key["attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": key["rope.freq_base"]}, tie_word_embeddings=False, attention_bias=False,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).eval()
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys, missing
    with torch.no_grad():
        return model(torch.from_numpy(np.load(OUT / "ids.npy").astype(np.int64)[None])).logits[0].numpy()


def main() -> None:
    if sys.argv[1] == "files":
        import llama_cpp

        ggml = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
        reader = GGUFReader(OUT / "F16.gguf")
        for name in TYPES:
            write(reader, ggml, GGMLQuantizationType[name])
        return
    assert (
        np.abs(logits_of(OUT / "Q8_0.gguf") - np.load(OUT / "Q8_0.logits.npy")).max() < 1e-5
    )  # the same way as those that are there
    for name in TYPES:
        np.save(OUT / f"{name}.logits.npy", logits_of(OUT / f"{name}.gguf"))


if __name__ == "__main__":
    main()
