"""Makes the golden encoder-decoders: a tiny random model of each family, its logits and its greedy text, computed by
transformers in float32.

    pip install ckdist[golden] && python tests/golden/make_encoder_decoder_golden.py

Each folder tests/golden/encoder_decoders/NAME holds
    config.json, model.safetensors   the model, weights float32
    sources.npz                      int32 (tokens,) each: what the encoder reads
    hidden.npy                       float32 (tokens, hidden): what it makes of the first
    greedy.npy                       int32 (sources, 24): the greedy texts, behind the tokens that decoding begins with
    logits.npy                       float32 (24, vocab): of the first text, from which its tokens are chosen
Head counts, ffn widths and vocabularies are such that shards over 2 and 3 ranks come out uneven.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForSeq2SeqLM

OUT = Path(__file__).parent / "encoder_decoders"
LENGTHS, TOKENS = (37, 5, 18), 24
SEEDS, SMALLEST_MARGIN = 40, 1e-3
VOCAB = 91
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 44,
    "num_heads": 3,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 0,
}
BART = {
    "model_type": "bart",
    "architectures": ["BartForConditionalGeneration"],
    "d_model": 24,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 36,
    "activation_function": "gelu",
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "vocab_size": VOCAB,
    "decoder_start_token_id": 2,
}
CONFIGS = {
    "t5": {**T5, "feed_forward_proj": "relu"},
    "t5_gated": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": BART,
    "marian": {
        **BART,
        "model_type": "marian",
        "architectures": ["MarianMTModel"],
        "activation_function": "swish",
        "decoder_start_token_id": 1,
        "pad_token_id": 1,
    },
}


def randomise(model, generator: torch.Generator) -> None:
    """Weights under which every part matters."""
    for name, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name and name.endswith("weight"):
            tensor.copy_(1.0 + 0.25 * noise)
        elif tensor.ndim == 1:
            tensor.copy_(0.5 * noise)
        elif "relative_attention_bias" in name:
            tensor.copy_(2.0 * noise)
        elif "embed_positions" in name and model.config.model_type == "marian":
            continue  # sines and cosines
        elif "shared" in name or "embed" in name:
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(1.5 * noise / tensor.shape[-1] ** 0.5)
    for name, buffer in model.named_buffers():
        if "final_logits_bias" in name:
            buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))


@torch.no_grad()
def texts(model, sources: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray, float]:
    """The greedy texts, the logits of the first, and the least distance of the best two logits as a share of the
    largest.
    """
    start, found, kept, margin = model.config.decoder_start_token_id, [], [], 1.0
    for source in sources:
        ids = torch.tensor([[start]])
        for _ in range(TOKENS):
            logits = model(input_ids=source[None], decoder_input_ids=ids, use_cache=False).logits[0, -1]
            top = logits.topk(2).values
            margin = min(margin, float((top[0] - top[1]) / logits.abs().max()))
            ids = torch.cat([ids, logits.argmax()[None, None]], dim=1)
            if source is sources[0]:
                kept.append(logits)
        found.append(ids[0, 1:].numpy().astype(np.int32))
    return np.stack(found), torch.stack(kept).numpy(), margin


def make(name: str, given: dict) -> None:
    """Writes one folder."""
    plain = {key: value for key, value in given.items() if key not in ("model_type", "architectures")}
    best = None
    for seed in range(SEEDS):
        generator = torch.Generator().manual_seed(seed)
        config = AutoConfig.for_model(given["model_type"], **plain)
        config._attn_implementation = "eager"
        model = AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).eval()
        if given.get("tie_word_embeddings") is False:
            model.lm_head.weight = torch.nn.Parameter(torch.zeros(VOCAB, given["d_model"]))
        with torch.no_grad():
            randomise(model, generator)
        sources = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
        greedy, logits, margin = texts(model, sources)
        varied = len(np.unique(greedy)) + 100 * len({tuple(row) for row in greedy})
        if margin > SMALLEST_MARGIN and (best is None or varied > best[0]):
            best = varied, margin, model, sources, greedy, logits
    assert best is not None, f"{name}: no seed below {SEEDS} keeps a margin of {SMALLEST_MARGIN}"
    _, margin, model, sources, greedy, logits = best
    folder = OUT / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(given, indent=2, sort_keys=True) + "\n")
    seen, tensors = set(), {}
    for key, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen and not (name == "marian" and "embed_positions" in key):
            tensors[key] = tensor.contiguous()
            seen.add(tensor.data_ptr())
    shared = next(key for key in tensors if tensors[key].shape[0] == VOCAB and "bias" not in key)
    stem = "shared.weight" if name.startswith("t5") else "model.shared.weight"
    tensors[stem] = tensors.pop(shared)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        hidden = model.get_encoder()(input_ids=sources[0][None]).last_hidden_state[0]
    arrays = {str(i): source.numpy().astype(np.int32) for i, source in enumerate(sources)}
    np.savez(folder / "sources.npz", **arrays)
    np.save(folder / "hidden.npy", hidden.numpy())
    np.save(folder / "greedy.npy", greedy)
    np.save(folder / "logits.npy", logits)
    size = (folder / "model.safetensors").stat().st_size
    print(name, transformers.__version__, f"margin {margin:.3g}, {len(np.unique(greedy))} tokens, {size} bytes")



if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(CONFIGS))
    torch.set_num_threads(1)
    for chosen in parser.parse_args().names:
        make(chosen, CONFIGS[chosen])
