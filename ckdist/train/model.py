"""The model to train, from disk or new: its program, the initial values of its weights, and its files."""

import functools
import json
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckdist.errors import ConfigError, LayoutError
from ckdist.layout import SINGLE
from ckdist.mesh import Mesh
from ckdist.models.decoder import SCORE
from ckdist.models.moe_weights import is_expert
from ckdist.models.registry import family, read_config
from ckdist.models.spec import ModelSpec, MoeFfn
from ckdist.models.training_loss import loss
from ckdist.native import lib
from ckdist.program.program import Program, Weight
from ckdist.program.training_tracer import TeacherLoss, TrainingTracer, trace_loss
from ckdist.regular_file import write_synced
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.tokenizer_source import tokenizer_of
from ckdist.tokens.tried import load_tried
from ckdist.train.arena import shape_of
from ckdist.train.config import TrainConfig
from ckdist.train.data.data_files import find_files
from ckdist.train.data.documents import read_documents
from ckdist.train.data.records import BadLine
from ckdist.train.initial import initial_matrix, initial_weight
from ckdist.train.loss_program import LossProgram, lower_model, trace_model, trainable
from ckdist.train.shards import Shards
from ckdist.train.stage import TrainingStage, product_operations
from ckdist.train.tokenizer_training import tokenizer_config, train_tokenizer
from ckdist.weights.adapter_file import FEED_FORWARD, MAGNITUDE, MODULES, Lora
from ckdist.weights.checkpoint import Checkpoint, open_checkpoint
from ckdist.weights.dequantize import read_tensor
from ckdist.weights.dtypes import BY_NUMBER, FLOATS
from ckdist.weights.handles import MatrixHandle
from ckdist.weights.loader import ShardLoader

INITIALIZER_RANGE = 0.02
ALL_LINEAR = "all-linear"  # as in PEFT


@dataclass(frozen=True)
class TrainedModel:
    """A model and the weights to train."""

    spec: ModelSpec
    config: Mapping[str, Any]  # config.json of the result
    program: Program  # the loss on one rank
    weights: tuple[Weight, ...]  # the trained ones, in the program's order
    load: Callable[[str], np.ndarray]  # name -> initial value, float32, of any weight of the program
    lora: Lora | None
    tracer: Callable[..., TrainingTracer]  # wrote `program`
    checkpoint: Checkpoint | None  # the base model; None for a new model
    tokenizer_folder: Path  # a folder, or a GGUF

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the trained weights, by name."""
        return {w.name: shape_of(w) for w in self.weights}

    def lowered(self, config: TrainConfig, mesh: Mesh, batches: int) -> LossProgram:
        """Returns the steps of this rank of a mesh. `batches`: most batches of a replica in one step.

        Raises ConfigError if the model cannot be sharded over this mesh.
        """
        chunks, tokens = config.virtual_pipeline_parallel_size, config.batch_tokens
        if (ranks := mesh.size("sp")) > 1:
            from ckdist.train.data.divided_batch import check_divided, tokens_of_rank

            check_divided(self.spec, self.program, ranks)
            tokens = tokens_of_rank(tokens, ranks)
        stage = TrainingStage.of(mesh, self.program, set(self.weights), chunks, batches)
        try:
            shards = Shards(trace_model(self.spec, mesh, self.tracer).weights, mesh)
            return lower_model(
                self.spec,
                tokens,
                "bfloat16" if config.bf16 else "float32",
                mesh,
                [w.name for w in self.weights],
                config.activation_checkpointing,
                self.tracer,
                frozenset(self._quantised(shards)),
                stage,
                config.zero_stage,
                config.weights_dtype,
            )
        except LayoutError as error:
            sharded = f" with tensor_parallel_size {mesh.size('tp')}" if mesh.size("tp") > 1 else ""
            raise ConfigError(f"this model cannot be trained{sharded}: {error}") from None

    def _quantised(self, shards: Shards) -> list[str]:
        """The frozen base matrices that stay quantised: this rank's shard of them has whole blocks."""
        if self.checkpoint is None:
            return []
        trained, found = {w.name for w in self.weights}, []
        for name, weight in shards.weights.items():
            if len(weight.dims) == 1 or name in trained or ".lora_" in name:
                continue
            kind, columns = BY_NUMBER[self.checkpoint.tensors[name].type], weight.dims[-1]
            unit = lib.ckdist_type_undivided_columns(kind.number)
            whole_blocks = all(edge % unit == 0 or edge == columns.elements for edge in columns.span(shards.mesh))
            scales = self.checkpoint.tensors[name].scales
            if kind not in FLOATS and whole_blocks and not (scales and scales.order):
                found.append(name)
        return found

    def stored(self, shards: Shards, names: Collection[str], threads: int) -> dict[str, MatrixHandle]:
        """Packs this rank's shards of the base's matrices `names` in the type of their file.

        Raises CapacityError if memory is short, ModelFileError for a damaged file.
        """
        if self.checkpoint is None or not names:
            return {}
        loader, handles = ShardLoader(self.checkpoint, threads), {}
        for name in names:
            rows, columns = (dim.span(shards.mesh) for dim in shards.weights[name].dims[-2:])
            handles[name] = loader.add_matrix(name, [rows], columns)
        loader.load(progress=False)
        return handles

    def operations(self, tokens: float, target_tokens: float) -> float:
        """Operations of the matrix products, forward and backward, without attention's own products.

        The output matrix counts per token with a target.
        """
        trained = set(self.weights)
        count = lambda instr: target_tokens if instr.op == "cross_entropy" else tokens
        return sum(count(instr) * product_operations(instr, trained) for instr in self.program.instrs)


def open_model(config: TrainConfig) -> TrainedModel:
    """Opens the model that a TrainConfig names or describes.

    Raises ConfigError, ModelFileError or ArchitectureError for a fault that the user can mend.
    """
    checkpoint = open_checkpoint(config.model_name_or_path) if config.model_name_or_path else None
    if checkpoint is not None and checkpoint.format == "gguf" and not config.lora_r:
        family(checkpoint.spec.family).gguf_form(
            checkpoint.spec, config.model_name_or_path
        )  # the result can be written
    values, spec = _described(config, checkpoint)
    spec = balanced(spec.at_context(config.max_length), config.router_aux_loss_coef)
    if config.max_length > spec.max_position:
        raise ConfigError(
            f"max_length ({config.max_length}) is more than the {spec.max_position} positions of the model"
        )
    targets = MODULES if config.lora_target_modules == (ALL_LINEAR,) else config.lora_target_modules
    lora = _lora(config, targets) if config.lora_r else None
    teacher = teacher_loss(config) if config.teacher_file else None
    more = {"teacher": teacher, "labels": 2 if config.method == "reward" else 0}
    tracer = functools.partial(TrainingTracer, low_rank=lora.low_rank() if lora else None, **more)
    program = trace_loss(loss, spec, SINGLE, Mesh({"dp": 1}), tracer)
    weights = tuple(w for w in trainable(program) if not lora or ".lora_" in w.name or w.name == SCORE)
    if lora and not weights:
        raise ConfigError(
            f"lora_target_modules ({', '.join(lora.targets)}) names no layer of {spec.family} that can have matrices"
        )
    queries = {"q_proj", "gate_proj"}
    if lora and config.use_dora and _joins_queries(spec) and len(queries & {*lora.targets}) == 1:
        raise ConfigError(
            f"use_dora: queries and their gates are one matrix in {spec.family}: name both or none of "
            f"{' and '.join(sorted(queries))} in lora_target_modules"
        )
    if any(is_expert(w.name) for w in weights if lora) and (config.use_dora or config.lora_dropout):
        name = "use_dora" if config.use_dora else f"lora_dropout ({config.lora_dropout:g})"
        raise ConfigError(
            f"{name} is not supported on experts: leave {', '.join(FEED_FORWARD)} out of lora_target_modules"
        )
    shapes = {w.name: shape_of(w) for w in program.weights}
    std = float(values.get("initializer_range", INITIALIZER_RANGE))

    def load(name: str) -> np.ndarray:
        """The initial value of a weight, float32."""
        if name.endswith(MAGNITUDE) and checkpoint is not None:  # the norms of the base's rows: it begins as the base
            base = read_tensor(checkpoint.tensors[name.removesuffix(MAGNITUDE) + ".weight"])
            return np.linalg.norm(base, axis=1)
        if ".lora_" in name:
            return initial_matrix(name, shapes[name], config.seed)
        if name == SCORE:  # the second label's row is zero
            return initial_weight(name, shapes[name], spec, std, config.seed) * np.array([[1], [0]], np.float32)
        if checkpoint is None:
            return initial_weight(name, shapes[name], spec, std, config.seed)
        return read_tensor(checkpoint.tensors[name])

    folder = Path(
        config.tokenizer_name or (config.model_name_or_path if checkpoint else Path(config.output_dir) / "tokenizer")
    )
    return TrainedModel(spec, values, program, weights, load, lora, tracer, checkpoint, folder)


def _joins_queries(spec: ModelSpec) -> bool:
    """True if a stored matrix has queries and their gates."""
    return family(spec.family).safetensors.has("joined", "model.layers.0.self_attn.q_proj.weight")


def _described(config: TrainConfig, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], ModelSpec]:
    """The fields of the result's config.json, and its model. Raises ConfigError for fields that are not known."""
    if config.rope_scaling:
        return _stretched(config, checkpoint)
    if checkpoint is not None:
        return dict(checkpoint.metadata), checkpoint.spec
    values = {"max_position_embeddings": config.max_length, "model_type": "llama", **config.model_config}
    spec, unknown = read_config(values, "model_config")
    if unknown:
        raise ConfigError(f"model_config: {unknown[0]}, and {spec.family} has no such field: remove or correct it")
    return values, spec


def _stretched(config: TrainConfig, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], ModelSpec]:
    """`_described` with `rope_scaling`. Raises ConfigError if the result cannot record it."""
    from ckdist.train.longer_context import stretched

    if checkpoint is None:
        raise ConfigError("rope_scaling is for a model to continue from: set model_config.rope_scaling")
    if checkpoint.format == "gguf" or config.lora_r:
        kind = "an adapter" if config.lora_r else "a GGUF whose base is one"
        raise ConfigError(
            f"rope_scaling cannot be recorded in {kind}: train all weights of a folder with safetensors, or write it "
            "into the base's config.json"
        )
    values = stretched(checkpoint.metadata, config.rope_scaling)
    made = read_config(values, "rope_scaling")[0]
    return values, replace(checkpoint.spec, ropes=made.ropes, layers=made.layers, max_position=made.max_position)


def _lora(config: TrainConfig, targets: Sequence[str]) -> Lora:
    more = {"dropout": config.lora_dropout, "has_magnitudes": config.use_dora}
    return Lora(config.lora_r, config.lora_alpha, tuple(targets), config.use_rslora, **more)


def teacher_loss(config: TrainConfig) -> TeacherLoss:
    """The loss that the header of the teacher's file describes. Raises ConfigError if there is no such file."""
    from ckdist.train.data.teacher_file import read_header

    header = read_header(config.teacher_file)
    return TeacherLoss(header.choices, header.temperature, config.teacher_weight)


def balanced(spec: ModelSpec, coefficient: float) -> ModelSpec:
    """Returns the model with this coefficient of the load-balancing loss; below 0: its own.

    Raises ConfigError if its layers do not choose experts by a softmax.
    """
    spec = spec if coefficient < 0 else replace(spec, balance_coefficient=coefficient)
    choices = [layer.ffn.routing for layer in spec.layers if isinstance(layer.ffn, MoeFfn)]
    if spec.balance_coefficient and not (choices and all(choice.scores == "softmax" for choice in choices)):
        raise ConfigError(
            f"router_aux_loss_coef ({spec.balance_coefficient:g}) is for experts that a softmax chooses, "
            f"and {spec.family} has none: set it to 0"
        )
    return spec


def open_tokenizer(config: TrainConfig, model: TrainedModel, make: bool) -> Tokenizer:
    """Returns the tokenizer of `model`.

    `make`: for a new model without tokenizer_name, train it on the data if it does not exist yet. Raises ConfigError if
    it cannot be made, or has more tokens than the model.
    """
    folder = model.tokenizer_folder
    trained_here = not config.tokenizer_name and not config.model_name_or_path
    if trained_here and make and not (folder / "tokenizer.json").is_file():
        _make_tokenizer(config, folder, model.spec.vocab_size)
    tokenizer = tokenizer_of(folder) if trained_here else load_tried(folder)
    if tokenizer.vocab_size > model.spec.vocab_size:
        raise ConfigError(
            f"the tokenizer in {folder} has {tokenizer.vocab_size} tokens, "
            f"and the model's vocab_size is {model.spec.vocab_size}: set model_config.vocab_size"
        )
    return tokenizer


def _make_tokenizer(config: TrainConfig, folder: Path, vocab_size: int) -> None:
    """Trains a tokenizer on the data and writes its files. Raises ConfigError on failure."""

    def texts() -> Iterator[str]:
        """The training texts."""
        for file in find_files(config.train_file):
            for document in read_documents(file, config.text_column):
                if isinstance(document, BadLine):
                    continue  # it is reported when the data is tokenised
                yield document.text or "\n".join(str(m.get("content") or "") for m in document.messages or ())

    made = train_tokenizer(texts(), vocab_size)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".tokenizer-", dir=folder.parent))
        write_synced(
            temporary / "tokenizer_config.json", json.dumps(tokenizer_config(config.max_length), indent=2).encode()
        )
        write_synced(temporary / "tokenizer.json", made.to_str().encode())
        temporary.chmod(0o755)
        try:
            temporary.rename(folder)
        except OSError:  # another host, on the same file system, was faster
            if not (folder / "tokenizer.json").is_file():
                raise
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise ConfigError(f"the tokenizer could not be written to {folder}: {error.strerror}") from None
