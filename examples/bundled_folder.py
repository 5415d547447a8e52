"""Writes the bundled model as a Hugging Face folder: BF16 weights, configuration, tokenizer with chat template, and the card."""

import json
import platform
from pathlib import Path

import torch
from safetensors.torch import save_file

from ckdist.train.tokenizer import CHAT_TEMPLATE

CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
license: psf-2.0
language: en
---
# The bundled model

A Llama of {parameters:.1f} million parameters ({layers} layers, hidden {hidden}, {heads} heads on {kv_heads} kv heads, tied embeddings,
byte-level BPE of {vocab} tokens, context {context}), small enough to travel with the package. It completes text that looks like
Python and says what functions of the standard library do. It is for trying the server and for tests: what it says is often wrong.

## How it was made

`examples/bundled_model.py` trained it from random weights.

| | |
|---|---|
| data | the `.py` files of the standard library of Python {python} (without tests, idlelib and tables), its language reference, and chats made of its docstrings |
| documents | {documents} files and pages, {entries} documented names |
| characters | {characters:,} |
| tokens of one epoch | {epoch_tokens:,} |
| tokens trained on | {tokens:,} in {steps:,} steps ({epochs:.1f} epochs) |
| sequence length | {sequence}, then {context} for the last fifth |
| optimizer | Muon (matrices) and AdamW (embedding, norms), peak learning rate {lr}, cosine over wall time, {batch_tokens} tokens a step, bfloat16 autocast |
| training loss | {loss:.3f} nats per token (running mean) |
| validation loss | {validation_loss:.3f} nats per token, on files held out |
| time | {minutes:.0f} minutes on {threads} CPU threads |
| seed | {seed} |

## License

The text is Python's, under the Python Software Foundation License Version 2 (https://docs.python.org/3/license.html); modules that carry
their own notices keep them. The weights hold no other text.
"""


def write_folder(out: Path, shape, model, tokenizer, special_tokens, eos_tokens, corpus, data, progress, args) -> None:
    """Writes every file beside its old version and then replaces it, so the folder is a whole model at any moment."""
    bos, eos = tokenizer.token_to_id(special_tokens[0]), [tokenizer.token_to_id(token) for token in eos_tokens]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **vars(shape),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": special_tokens[0],
        "eos_token": special_tokens[0],
        "additional_special_tokens": list(special_tokens[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": shape.max_position_embeddings,
        "chat_template": CHAT_TEMPLATE,
    }
    card = CARD.format(
        parameters=sum(p.numel() for p in model.parameters()) / 1e6,
        layers=shape.num_hidden_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        vocab=shape.vocab_size,
        context=shape.max_position_embeddings,
        python=".".join(platform.python_version_tuple()[:2]),
        documents=len(corpus.train),
        entries=len(corpus.entries),
        characters=corpus.characters,
        epoch_tokens=data.tokens_per_epoch,
        tokens=progress.tokens,
        steps=progress.step,
        epochs=progress.tokens / data.tokens_per_epoch,
        sequence=args.sequence,
        lr=args.lr,
        batch_tokens=args.batch_tokens,
        loss=progress.loss,
        validation_loss=progress.validation_loss,
        minutes=progress.seconds / 60,
        threads=args.threads,
        seed=args.seed,
    )
    write_text(out / "config.json", json.dumps(config, indent=2) + "\n")
    write_text(out / "generation_config.json", json.dumps({"bos_token_id": bos, "eos_token_id": eos}, indent=2) + "\n")
    write_text(out / "tokenizer_config.json", json.dumps(tokenizer_config, indent=2) + "\n")
    write_text(out / "tokenizer.json", tokenizer.to_str())
    write_text(out / "README.md", card)
    weights = out / "model.safetensors"
    tensors = {f"model.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, weights.with_suffix(".tmp"), metadata={"format": "pt"})
    weights.with_suffix(".tmp").chmod(0o644)  # the library writes for its owner alone
    weights.with_suffix(".tmp").replace(weights)


def write_text(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    path.with_suffix(".tmp").replace(path)
