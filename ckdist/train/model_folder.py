"""Writes the finished model as a Hugging Face folder (config, safetensors, tokenizer) that ckdist and transformers
load.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ckdist.models.registry import family
from ckdist.regular_file import sync, write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.data.turns import end_of_text
from ckdist.train.model import TrainedModel
from ckdist.train.stored_tensors import stored_tensors
from ckdist.weights.safetensors import SINGLE_FILE
from ckdist.weights.safetensors_writer import TensorToWrite, as_stored, write_safetensors

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def write_folder(
    out: Path, model: TrainedModel, parameters: Mapping[str, np.ndarray], tokenizer: Tokenizer, save_dtype: str
) -> None:
    """Writes the model to `out`. Each file is written under a temporary name and then replaces its old version."""
    out.mkdir(parents=True, exist_ok=True)
    # Weights are saved as floats.
    own = {name: value for name, value in model.config.items() if name != "quantization_config"}
    config = {"architectures": [family(model.spec.family).architectures[0]], **own, "torch_dtype": save_dtype}
    config |= {"vocab_size": model.spec.vocab_size, "tie_word_embeddings": model.spec.tie_embeddings}
    if "eos_token_id" not in config:
        ends = sorted(
            tokenizer.eos_token_ids | {i for i in tokenizer.special_ids if tokenizer.token_text(i) == "<|end|>"}
        )
        config |= {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": ends if len(ends) > 1 else end_of_text(tokenizer),
        }
    for name in TOKENIZER_FILES:
        source = model.tokenizer_folder / name
        if source.is_file() and (out / name).resolve() != source.resolve():
            shutil.copyfile(source, out / f"{name}.tmp")
            (out / f"{name}.tmp").replace(out / name)
    frozen = {w.name: model.load(w.name) for w in model.program.weights if w.name not in parameters}
    dtype = _TYPES[save_dtype]
    tensors = [
        TensorToWrite(t.name, dtype, t.shape, lambda t=t: as_stored(t.values(), dtype))
        for t in stored_tensors(model.spec, {**parameters, **frozen})
    ]
    write_safetensors(out / f"{SINGLE_FILE}.tmp", tensors, {"format": "pt"})
    (out / f"{SINGLE_FILE}.tmp").replace(out / SINGLE_FILE)
    write_synced(out / "config.json.tmp", (json.dumps(config, indent=2) + "\n").encode())
    (out / "config.json.tmp").replace(out / "config.json")
    sync(out)
