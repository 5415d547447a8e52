"""Writes a finished model: a Hugging Face folder (config, safetensors, tokenizer), or a GGUF if its base is one."""

import contextlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, RequestError
from ckdist.models.decoder import OUTPUT, SCORE
from ckdist.models.registry import family
from ckdist.models.spec import ModelSpec
from ckdist.regular_file import sync, write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.arena import NARROW, widened
from ckdist.train.config import TrainConfig
from ckdist.train.data.chats import ChatProcess
from ckdist.train.data.turns import end_of_text
from ckdist.train.model import TrainedModel
from ckdist.train.stored_tensors import stored_tensors
from ckdist.weights.adapter_file import save_adapter
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.dequantize import read_rows
from ckdist.weights.gguf_export import write_model
from ckdist.weights.safetensors import SINGLE_FILE
from ckdist.weights.safetensors_writer import TensorToWrite, as_stored, write_safetensors
from ckdist.weights.stored_ranking import DOCUMENT, QUERY, RERANK_FILE
from ckdist.weights.tensor_source import TensorSource

_TYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
CLASSIFIER = "ForSequenceClassification"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt",
    "chat_template.jinja", "generation_config.json",
)  # fmt: skip


def write_result(
    output: Path,
    model: TrainedModel,
    parameters: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    config: TrainConfig,
    inside: bool = False,
) -> Path:
    """Writes `output`/model, `output`/model.gguf or `output`/adapter, and returns its path.

    Args:
        parameters: The trained weights.
        inside: The files are written to the folder `output` itself, as in checkpoints.
    """
    if model.lora:
        out = output if inside else output / "adapter"
        save_adapter(out, model.lora, config.model_name_or_path.removeprefix("hf:"), parameters, model.spec)
        if SCORE in parameters:
            _write_question(out, model, tokenizer)
        return out
    if model.checkpoint is not None and model.checkpoint.format == "gguf":
        return _write_gguf(output / "model.gguf", model.checkpoint, parameters, _TYPES[config.save_dtype].lower())
    out = output if inside else output / "model"
    frozen = {w.name: model.load(w.name) for w in model.program.weights if w.name not in parameters}
    weights, fields = {**parameters, **frozen}, dict(model.config)
    if SCORE in weights:
        weights[SCORE] = weights[SCORE][:1]
        if not model.spec.tie_embeddings:
            weights[OUTPUT] = model.load(OUTPUT)
        architecture = family(model.spec.family).architectures[0].replace("ForCausalLM", CLASSIFIER)
        fields |= {"architectures": [architecture], "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
        fields.setdefault("pad_token_id", end_of_text(tokenizer))
        _write_question(out, model, tokenizer)
    write_folder(out, model.spec, fields, weights, tokenizer, model.tokenizer_folder, config.save_dtype)
    return out


def _write_gguf(out: Path, base: Checkpoint, parameters: Mapping[str, np.ndarray], kind: str) -> Path:
    """Writes the trained weights, and the frozen ones of the base."""

    def rows(name: str, source: TensorSource, begin: int, end: int, matrix: int = 0, /) -> np.ndarray:
        """Rows of a trained weight, or of a frozen one in the base."""
        if name not in parameters:
            return read_rows(source, begin, end, matrix)
        values = parameters[name]
        return widened(values[matrix, begin:end] if source.matrices else values[begin:end])

    write_model(base, str(out), kind, read=rows)
    return out


def _converted(values: np.ndarray, dtype: str) -> np.ndarray:
    """The values as `dtype` of a file."""
    return values if values.dtype == NARROW and dtype == "BF16" else as_stored(widened(values), dtype)


def _write_question(out: Path, model: TrainedModel, tokenizer: Tokenizer) -> None:
    """Writes the text around a question and its answer, which servers need to score it."""
    template = out.joinpath(*RERANK_FILE)
    template.parent.mkdir(parents=True, exist_ok=True)
    write_synced(template, _rerank_template(model.tokenizer_folder, tokenizer).encode())


def _rerank_template(folder: Path, tokenizer: Tokenizer) -> str:
    """The text that a reward model reads, as its training renders it: marks for a question and an answer, up to the
    answer's end token.
    """
    if not tokenizer.templates:
        end = end_of_text(tokenizer)
        return QUERY + DOCUMENT + ("" if end is None else tokenizer.token_text(end))
    chat = [{"role": "user", "content": QUERY}, {"role": "assistant", "content": DOCUMENT}]
    with contextlib.closing(ChatProcess(folder)) as process:
        (written,) = process.write([(chat, [])])
    if isinstance(written, RequestError):
        raise ConfigError(f"the chat template of {folder} refuses a question with an answer: {written}")
    turn = written[-1]
    text = turn.prompt + turn.answer[: turn.learned[-1][1]]
    if not 0 <= text.find(QUERY) < text.find(DOCUMENT):
        raise ConfigError(f"the chat template of {folder} changes the words of a question or its answer")
    return text


def write_folder(
    out: Path,
    spec: ModelSpec,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    tokenizer: Tokenizer,
    tokenizer_folder: Path,
    save_dtype: str,
) -> None:
    """Writes a model to `out`. Each file is written under a temporary name and then replaces its old version.

    Args:
        config: The fields of config.json.
        weights: float32 or bfloat16, by the program's names.
        tokenizer_folder: Its tokenizer's files are copied.
        save_dtype: bfloat16, float16 or float32.
    """
    out.mkdir(parents=True, exist_ok=True)
    # Weights are saved as floats.
    own = {name: value for name, value in config.items() if name not in ("quantization_config", "dtype")}
    config = {"architectures": [family(spec.family).architectures[0]], **own, "torch_dtype": save_dtype}
    config |= {"vocab_size": spec.vocab_size, "tie_word_embeddings": spec.tie_embeddings}
    if "eos_token_id" not in config:
        ends = sorted(
            tokenizer.eos_token_ids | {i for i in tokenizer.special_ids if tokenizer.token_text(i) == "<|end|>"}
        )
        config |= {
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": ends if len(ends) > 1 else end_of_text(tokenizer),
        }
    for name in TOKENIZER_FILES:
        source = tokenizer_folder / name
        if source.is_file() and (out / name).resolve() != source.resolve():
            shutil.copyfile(source, out / f"{name}.tmp")
            (out / f"{name}.tmp").replace(out / name)
    dtype = _TYPES[save_dtype]
    tensors = [
        TensorToWrite(t.name, dtype, t.shape, lambda t=t: _converted(t.values(), dtype))
        for t in stored_tensors(spec, weights)
    ]
    write_safetensors(out / f"{SINGLE_FILE}.tmp", tensors, {"format": "pt"})
    (out / f"{SINGLE_FILE}.tmp").replace(out / SINGLE_FILE)
    write_synced(out / "config.json.tmp", (json.dumps(config, indent=2) + "\n").encode())
    (out / "config.json.tmp").replace(out / "config.json")
    sync(out)
