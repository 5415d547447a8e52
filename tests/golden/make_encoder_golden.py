"""Makes the golden encoders: a tiny random model per family and its hidden states, computed by transformers in float32.

    pip install ckdist[golden] && python tests/golden/make_encoder_golden.py

Each folder tests/golden/encoders/FAMILY holds
    config.json, model.safetensors   the model, weights float32
    ids.npy                          int32 (64,)
    hidden.npy                       float32 (64, hidden), `last_hidden_state`
of a cross-encoder in its place
    scores.npy                       float32 (2,), logits of the pairs of the first 24 tokens and the next 40, or 15
Head counts and ffn widths are such that shards over 2 and 3 ranks come out uneven.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

OUT = Path(__file__).parent / "encoders"
TOKENS, FIRST_TEXT, PAIRS = 64, 24, (64, 39)
COMMON = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 88,
    "torch_dtype": "float32",
}
SCORER = {"hidden_size": 24, "intermediate_size": 40, "id2label": {"0": "LABEL_0"}}
CONFIGS = {
    "bert": {"model_type": "bert", "max_position_embeddings": 96, "hidden_act": "gelu", "architectures": ["BertModel"]},
    "roberta": {
        "model_type": "xlm-roberta",
        "max_position_embeddings": 98,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        "architectures": ["XLMRobertaModel"],
    },
    "nomic_bert": {
        "model_type": "nomic_bert",
        "max_position_embeddings": 96,
        "architectures": ["NomicBertModel"],
    },
    "modernbert": {
        "model_type": "modernbert",
        "max_position_embeddings": 96,
        "local_attention": 24,
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 3,
        **{f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep")},
        "pad_token_id": 0,
        "architectures": ["ModernBertModel"],
    },
    "embedding_gemma": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "sliding_window": 24,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1000000.0,
        "use_bidirectional_attention": True,
        "projections": [72, 48],
        "architectures": ["Gemma3TextModel"],
    },
    "bert_scorer": {
        "model_type": "bert",
        "max_position_embeddings": 96,
        "hidden_act": "gelu",
        **SCORER,
        "architectures": ["BertForSequenceClassification"],
    },
    "roberta_scorer": {
        "model_type": "xlm-roberta",
        "max_position_embeddings": 98,
        "pad_token_id": 1,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-5,
        **SCORER,
        "architectures": ["XLMRobertaForSequenceClassification"],
    },
    "modernbert_scorer": {
        "model_type": "modernbert",
        "max_position_embeddings": 96,
        "local_attention": 24,
        "global_attn_every_n_layers": 2,
        "num_hidden_layers": 2,
        **{f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep")},
        "pad_token_id": 0,
        "classifier_pooling": "mean",
        **SCORER,
        "architectures": ["ModernBertForSequenceClassification"],
    },
}


def make(name: str, fields: dict) -> None:
    """Writes one folder."""
    given = {**COMMON, **fields}
    kind, widths = given.pop("model_type"), given.pop("projections", [])
    scores = "id2label" in given
    labels = {"id2label": {0: "LABEL_0"}, "label2id": {"LABEL_0": 0}} if scores else {}
    plain = {k: v for k, v in given.items() if k not in ("torch_dtype", "id2label")}
    config = AutoConfig.for_model(kind, **plain, **labels)
    config._attn_implementation = "eager"
    torch.manual_seed(7)
    maker = AutoModelForSequenceClassification if scores else AutoModel
    model = maker.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            spread = 0.5 if tensor.ndim == 1 else 1.5 / tensor.shape[-1] ** 0.5
            is_norm = "norm" in key.lower() and key.endswith("weight")
            center = 1.0 if is_norm and not kind.startswith("gemma") else 0.0  # Gemma multiplies by 1 + weight
            tensor.copy_(center + spread * torch.randn_like(tensor))
        ids = np.random.default_rng(3).integers(2, COMMON["vocab_size"], TOKENS, dtype=np.int32)
        result = scores_of(model, ids) if scores else model(torch.from_numpy(ids).long()[None]).last_hidden_state[0]
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    written = {"model_type": kind, **given}
    (folder / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    result = result @ write_dense_layers(folder, given["hidden_size"], widths).T if widths else result
    np.save(folder / "ids.npy", ids)
    np.save(folder / ("scores.npy" if scores else "hidden.npy"), result.numpy().astype(np.float32))
    print(name, transformers.__version__, sorted(tensors)[:4], result.abs().max())


def write_dense_layers(folder: Path, inputs: int, widths: list[int]) -> torch.Tensor:
    """Writes layers as sentence-transformers saves them. Returns the product of their matrices, (width, inputs)."""
    product = torch.eye(inputs)
    for i, width in enumerate(widths, 2):
        weight = torch.randn(width, inputs) / inputs**0.5
        (folder / f"{i}_Dense").mkdir(exist_ok=True)
        about = {"in_features": inputs, "out_features": width, "bias": False}
        about["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / f"{i}_Dense" / "config.json").write_text(json.dumps(about, indent=2) + "\n")
        save_file({"linear.weight": weight}, folder / f"{i}_Dense" / "model.safetensors", metadata={"format": "pt"})
        product, inputs = weight @ product, width
    return product


def scores_of(model, ids: np.ndarray) -> torch.Tensor:
    """The logit of each pair."""
    found = []
    for end in PAIRS:
        inputs = {"input_ids": torch.from_numpy(ids[:end]).long()[None]}
        if getattr(model.config, "type_vocab_size", 1) > 1:
            inputs["token_type_ids"] = (torch.arange(end) >= FIRST_TEXT).long()[None]
        found.append(model(**inputs).logits[0, 0])
    return torch.stack(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(CONFIGS))
    for chosen in parser.parse_args().names:
        make(chosen, CONFIGS[chosen])
