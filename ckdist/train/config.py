"""The settings of `ckdist train`: one frozen dataclass, read from TOML. Names follow the Hugging Face Trainer.

It checks each field and combinations of fields. The code that opens files and models checks these.
"""

import difflib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from ckdist.comm.transports.names import CHOICES, ENCRYPT
from ckdist.config.options import Settings, option
from ckdist.errors import ConfigError
from ckdist.text_file import read_text_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEDULES = ("constant", "linear", "cosine", "wsd")
# Method -> the fields that only some methods read.
USED_BY: dict[str, tuple[str, ...]] = {
    "sft": ("train_file_weights",),
    "dpo": ("beta", "loss_type", "rpo_alpha"),
    "orpo": ("beta",),
    "kto": ("beta", "desirable_weight", "undesirable_weight"),
    "reward": (),
    "grpo": ("reward", "num_generations", "max_completion_length", "num_iterations", "epsilon", "kl_coef"),
}
MAX_STEPS = 1 << 40
ALL_FIELDS = "'Fields of a training' in the documentation lists all"
MAX_CONFIG_BYTES = 1 << 20
# Field -> its names in other trainers.
_OTHERS = {
    "learning_rate": "lr max_lr", "min_lr_ratio": "min_lr", "lr_scheduler_type": "lr_scheduler scheduler",
    "num_train_epochs": "epochs num_epochs", "max_steps": "steps",
    "per_device_train_batch_size": "batch_size micro_batch_size",
    "gradient_accumulation_steps": "grad_accum accumulation_steps",
    "max_length": "max_seq_length max_seq_len seq_len block_size sequence_len context_length",
    "model_name_or_path": "model base_model", "tokenizer_name": "tokenizer",
    "train_file": "data dataset datasets train_data", "train_file_weights": "weights train_weights dataset_weights",
    "validation_file": "eval_file", "output_dir": "output out", "optim": "optimizer", "warmup_steps": "warmup",
    "max_grad_norm": "grad_clip clip_grad", "activation_checkpointing": "gradient_checkpointing",
    "lora_r": "r rank lora_rank", "lora_alpha": "alpha", "lora_target_modules": "target_modules",
    "resume": "resume_from_checkpoint", "adam_beta1": "beta1", "adam_beta2": "beta2", "tensor_parallel_size": "tp",
    "teacher_file": "teacher distill", "early_stopping": "patience early_stopping_patience",
    "pipeline_parallel_size": "pp", "data_parallel_size": "dp",
    "sequence_parallel_size": "sp cp context_parallel_size", "zero_stage": "zero", "weight_decay": "wd",
    "weights_dtype": "dtype torch_dtype weight_dtype",
}  # fmt: skip
OTHER_NAMES = {other: name for name, others in _OTHERS.items() for other in others.split()}


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Settings, has_flags=False):
    """The settings of one training: of `model_name_or_path`, or of a new model that `model_config` describes."""

    output_dir: str = option("", help="folder of the trained model, its checkpoints, metrics and token cache")
    model_name_or_path: str = option("", help="model to continue from: a folder with safetensors, or hf:owner/repo")
    model_config: dict[str, Any] = option(dict, help="a new model: the fields of a Hugging Face config.json")
    tokenizer_name: str = option(
        "", help="folder of a tokenizer (default: the model's own; for a new model, one is trained on the data)"
    )

    rope_scaling: dict[str, Any] = option(
        dict,
        help="RoPE scaling for contexts beyond the base's, as in config.json: rope_type linear, yarn or llama3, and a "
        "factor; the result's config.json has it",
    )

    train_file: tuple[str, ...] = option(
        (),
        help="text, .jsonl, .json, .csv and .parquet files, or folders of them; * and ** match, {stdlib} is the folder "
        "of Python's library",
    )
    train_file_weights: tuple[float, ...] = option(
        (),
        kind=float,
        within=(0, 1e4),
        help="passes of an epoch over each entry of train_file, as [2, 0.5]; a fraction is a random part of its "
        "documents (default: 1 for each)",
    )
    validation_file: tuple[str, ...] = option(
        (),
        help="files for the validation loss; at most 256 rows are used (default: a part of the training documents)",
    )
    validation_split_percentage: float = option(
        2.0, help="per cent of the training documents that are held out for validation", within=(0, 50)
    )
    text_column: str = option("text", help="field or column that holds the text of .jsonl, .json, .csv and .parquet")
    bad_lines: str = option(
        "error",
        help="at a line that cannot be used: stop (error), or count it and go on (skip)",
        choices=("error", "skip"),
    )
    cache_dir: str = option("", help="folder of the token cache (default: output_dir/cache)")

    max_length: int = option(512, help="longest sequence in tokens; longer chats are truncated", within=(2, 1 << 20))
    per_device_train_batch_size: int = option(
        8, help="sequences of max_length in one batch of a replica", within=(1, 1 << 16)
    )
    gradient_accumulation_steps: int = option(1, help="batches of every replica in one step", within=(1, 1 << 16))
    global_batch_size: int = option(
        0,
        help="sequences of a step over all replicas, however many there are; 0: per_device_train_batch_size * "
        "gradient_accumulation_steps of each",
        within=(0, 1 << 30),
    )
    num_train_epochs: float = option(1.0, help="passes over the data; max_steps has precedence", within=(0, 1e6))
    max_steps: int = option(-1, help="total number of steps; -1: from num_train_epochs", within=(-1, MAX_STEPS))
    seed: int = option(42, help="seed of the shuffle and of new weights", within=(0, (1 << 63) - 1))

    optim: str = option(
        "adamw",
        help="adamw (weight decay decoupled, none on norms and biases), adamw_8bit (its moments in 8 bits), adafactor "
        "(a matrix has means of rows and columns), sgd, or muon (matrices; adamw for the rest)",
        choices=("adamw", "sgd", "muon", "adafactor", "adamw_8bit"),
    )
    learning_rate: float = option(5e-5, help="peak learning rate", within=(0, 1e3))
    weight_decay: float = option(
        0.0, help="each step multiplies weights by 1 - learning rate * weight_decay", within=(0, 1e3)
    )
    adam_beta1: float = option(0.9, help="decay of the running mean of gradients", within=(0, 0.999999))
    adam_beta2: float = option(0.999, help="decay of the running mean of squared gradients", within=(0, 0.99999999))
    adam_epsilon: float = option(1e-8, help="added to the root of the mean of squared gradients", within=(0, 1))
    muon_momentum: float = option(0.95, help="momentum of muon's matrices", within=(0, 0.999999))
    momentum: float = option(0.9, help="momentum of sgd", within=(0, 0.999999))
    max_grad_norm: float = option(1.0, help="clip the gradient's global norm to this; 0: no clipping", within=(0, 1e9))
    on_nan: str = option(
        "skip",
        help="at a loss or gradient that is not finite: skip the step, go back to the last checkpoint's weights, or "
        "stop; ten in a row, or a tenth of all steps, always stop",
        choices=("skip", "back", "stop"),
    )
    on_spike: str = option(
        "report",
        help="if the gradient's norm is above 10 times its running mean, or the loss above twice its own plus 1: only "
        "report it, or as on_nan",
        choices=("report", "skip", "back", "stop"),
    )
    lr_scheduler_type: str = option("linear", help="shape of the learning rate after the warm-up", choices=SCHEDULES)
    warmup_steps: int = option(0, help="steps of the learning rate's warm-up", within=(0, MAX_STEPS))
    warmup_ratio: float = option(
        0.0, help="warm-up as a fraction of all steps; warmup_steps has precedence", within=(0, 1)
    )
    num_decay_steps: int = option(
        0, help="wsd: steps of the decay at the end; 0: a tenth of all", within=(0, MAX_STEPS)
    )
    min_lr_ratio: float = option(
        0.0, help="final learning rate of linear, cosine and wsd, as a fraction of learning_rate", within=(0, 1)
    )

    method: str = option(
        "sft",
        help="sft: learn the texts and answers; dpo, orpo or kto: learn from preferences; reward: learn to score "
        "answers; grpo: learn from rewards of sampled answers",
        choices=tuple(USED_BY),
    )
    beta: float = option(0.1, help="dpo, kto: weight of the distance from the model before training; orpo: weight of "
                         "the odds ratio", within=(1e-6, 1e3))  # fmt: skip
    loss_type: str = option("sigmoid", help="loss of dpo", choices=("sigmoid", "hinge", "ipo"))
    rpo_alpha: float = option(0.0, help="dpo: weight of the chosen answers' cross-entropy", within=(0, 1e3))
    desirable_weight: float = option(1.0, help="kto: weight of answers with a true label", within=(0, 1e3))
    undesirable_weight: float = option(1.0, help="kto: weight of answers with a false label", within=(0, 1e3))

    reward: str = option(
        "exact",
        help="grpo: exact (1 if an answer is the record's), regex:PATTERN (1 if the last matches in both are equal), "
        "or FILE.py:FUNCTION, called with the prompt, the answer and the record's answer",
    )
    num_generations: int = option(8, help="grpo: answers that are sampled for each prompt", within=(2, 1024))
    max_completion_length: int = option(256, help="grpo: most tokens of a sampled answer", within=(1, 1 << 20))
    num_iterations: int = option(1, help="grpo: updates with the answers of one step", within=(1, 64))
    epsilon: float = option(0.2, help="grpo: ratios of probabilities beyond 1 ± this are clipped", within=(0, 1))
    kl_coef: float = option(0.0, help="grpo: weight of the divergence from the model before training", within=(0, 1e3))

    teacher_file: str = option("", help="file of ckdist distill for this data: the loss follows a teacher")
    teacher_weight: float = option(
        1.0, help="weight of the divergence from the teacher; 1 - this is that of the cross-entropy", within=(0, 1)
    )

    router_aux_loss_coef: float = option(
        -1.0, help="coefficient of the load-balancing loss of experts; 0: none; -1: the model's own", within=(-1, 1e6)
    )

    bf16: bool = option(
        True, help="multiply in bfloat16 (sums and optimizer state stay float32); false: all in float32"
    )
    weights_dtype: str = option(
        "float32",
        help="type of the trained weights in memory; bfloat16: updates are computed in float32 and rounded at random "
        "(stochastic rounding), without float32 copies",
        choices=("float32", "bfloat16"),
    )
    activation_checkpointing: bool = option(
        False, help="keep only the input of each layer and recompute the rest: less memory, a third more work"
    )
    tensor_parallel_size: int = option(
        1, help="ranks that shard each stage's heads, ffn and vocabulary", within=(1, 1 << 16)
    )
    data_parallel_size: int = option(
        0, help="replicas, each with its part of every batch; 0: as many as the ranks allow", within=(0, 1 << 16)
    )
    sequence_parallel_size: int = option(
        1, help="ranks that divide the tokens of each sequence of a replica", within=(1, 1 << 16)
    )
    pipeline_parallel_size: int = option(
        1,
        help="pipeline stages, each with a part of the layers; gradient_accumulation_steps batches fill them",
        within=(1, 1 << 16),
    )
    virtual_pipeline_parallel_size: int = option(
        1, help="chunks of layers of each stage; 2 or more: interleaved 1F1B", within=(1, 1 << 16)
    )
    expert_parallel_size: int = option(1, help="ranks that shard experts; only 1 is supported", within=(1, 1 << 16))
    zero_stage: int = option(
        0,
        help="1: shard the optimizer's state over replicas; 2: and gradients; 3: and weights, which are gathered layer "
        "by layer",
        within=(0, 3),
    )
    threads: int = option(0, help="compute threads of one rank; 0: its share of the cores", within=(0, 4096))
    transport: str = option("auto", help="transport between hosts", choices=CHOICES)
    encrypt: str = option("auto", help="encryption between hosts, as --encrypt of ckdist serve", choices=ENCRYPT)
    ddp_timeout: float = option(
        1800.0, help="seconds until a rank that is alive but does not respond counts as lost", within=(1, 1e6)
    )

    lora_r: int = option(
        0, help="rank of LoRA's matrices; only these are trained; 0: train all weights", within=(0, 1 << 14)
    )
    lora_alpha: float = option(16.0, help="LoRA's product is scaled by alpha / rank", within=(0, 1e6))
    lora_target_modules: tuple[str, ...] = option(
        ("q_proj", "v_proj"), help="linear layers that get LoRA's matrices; all-linear: all of them"
    )

    use_rslora: bool = option(False, help="scale LoRA's product by alpha / sqrt(rank) (rsLoRA)")
    use_dora: bool = option(False, help="train the magnitudes of the rows of adapted matrices too (DoRA)")
    lora_dropout: float = option(
        0.0,
        help="share of the elements of a layer's input that LoRA's matrices do not read in a step",
        within=(0, 0.99),
    )

    logging_steps: int = option(10, help="steps between lines of metrics.jsonl", within=(1, MAX_STEPS))
    eval_steps: int = option(0, help="steps between validation losses; 0: only at the end", within=(0, MAX_STEPS))
    samples: int = option(
        0, help="held-out prompts that are continued, without randomness, at each validation loss", within=(0, 64)
    )
    early_stopping: int = option(
        0,
        help="validation losses without an improvement after which training ends; the model is then that of the best "
        "one; 0: never",
        within=(0, MAX_STEPS),
    )
    save_steps: int = option(500, help="steps between checkpoints; 0: only at the end", within=(0, MAX_STEPS))
    save_total_limit: int = option(2, help="checkpoints that are kept; 0: all", within=(0, 1 << 20))
    resume: str = option(
        "auto", help="auto: from the latest checkpoint in output_dir; never; or the folder of a checkpoint"
    )
    save_dtype: str = option(
        "bfloat16", help="type of the weights in the finished model", choices=("bfloat16", "float16", "float32")
    )
    trace: str = option("", help="file for the newest events of every thread of every rank, for Perfetto")
    report_to: tuple[str, ...] = option(
        (), help="trackers that get the logged numbers too", choices=("tensorboard", "wandb", "mlflow")
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("output_dir", "train_file"):
            if not getattr(self, name):
                raise ConfigError(f"{name} is missing: set it in the configuration, or with --set {name}=...")
        if bool(self.model_name_or_path) == bool(self.model_config):
            given = "both are" if self.model_config else "neither is"
            raise ConfigError(
                f"model_name_or_path (a model to continue from) or model_config (a new model) is needed, "
                f"and {given} given"
            )
        if self.train_file_weights and len(self.train_file_weights) != len(self.train_file):
            raise ConfigError(
                f"train_file_weights has {len(self.train_file_weights)} numbers, and train_file has "
                f"{len(self.train_file)} entries: give one for each"
            )
        self._check_method()
        remedy = "batches, layers and tensors are divided over ranks, not experts"
        self._check("training", remedy, expert_parallel_size=1)
        if self.zero_stage > 1:
            needs = f"zero_stage {self.zero_stage}"
            self._check(needs, "set zero_stage to 1", method="sft", pipeline_parallel_size=1)
            if self.zero_stage > 2:
                self._check(needs, "set zero_stage to 2, and tensor_parallel_size to shard the base", lora_r=0)
        if self.sequence_parallel_size > 1:
            needs = f"sequence_parallel_size {self.sequence_parallel_size}"
            self._check(needs, "a rank needs whole sequences", method="sft", samples=0)
        if self.pipeline_parallel_size > 1:
            self._check(f"pipeline_parallel_size {self.pipeline_parallel_size}", "a rank needs all layers", samples=0)
        if self.global_batch_size:
            needs = f"global_batch_size {self.global_batch_size}"
            self._check(needs, "it follows from the ranks, leave it out", gradient_accumulation_steps=1)
        if self.early_stopping and not self.eval_steps:
            raise ConfigError(f"early_stopping ({self.early_stopping}) needs validation losses: set eval_steps")
        if self.lora_r:
            if not self.model_name_or_path:
                raise ConfigError(f"lora_r ({self.lora_r}) needs a model to continue from: set model_name_or_path")
            remedy = "set lora_r to 0 (ckdist tune --full), or leave it out"
            self._check(f"lora_r {self.lora_r}, which trains few weights", remedy, weights_dtype="float32")
        for name in ("use_dora", "lora_dropout") if not self.lora_r else ():
            if getattr(self, name):
                raise ConfigError(f"{name} ({getattr(self, name)}) has no effect without lora_r: set lora_r")
        if self.lora_dropout:
            self._check(f"lora_dropout {self.lora_dropout:g}", "leave one of them out", method="sft", use_dora=False)
        if self.resume in ("", "latest"):
            raise ConfigError(f"resume ({self.resume!r}) must be auto, never, or a checkpoint's folder")

    @property
    def batch_tokens(self) -> int:
        """Most tokens of a batch. A row of preferences has two sequences, a prompt of GRPO all its answers."""
        sequences = {"sft": 1, "grpo": self.num_generations}.get(self.method, 2)
        return self.per_device_train_batch_size * self.max_length * sequences

    def _check(self, setting: str, remedy: str, **needed: object) -> None:
        """Raises ConfigError if a field does not have the value that `setting` needs."""
        for name, value in needed.items():
            if (given := getattr(self, name)) != value:
                wanted = "empty" if value == () else value
                raise ConfigError(f"{name} ({given}) must be {wanted} with {setting}: {remedy}")

    def _check_method(self) -> None:
        """Raises ConfigError for a setting that the method would ignore."""
        for name in dict.fromkeys(name for names in USED_BY.values() for name in names):
            value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
            if name not in USED_BY[self.method] and value != default:
                raise ConfigError(f"{name} ({value}) has no effect with method {self.method}: leave it out")
        if self.teacher_file:
            self._check("a teacher_file", "leave it out", method="sft", validation_file=(), pipeline_parallel_size=1)
        elif self.teacher_weight != 1:
            raise ConfigError(
                f"teacher_weight ({self.teacher_weight:g}) has no effect without a teacher_file: give one"
            )

    def as_dict(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


def from_mapping(values: Mapping[str, Any], where: str) -> TrainConfig:
    """Returns the configuration of `values`.

    Raises ConfigError, which begins with `where`, for a wrong value or an unknown field. It names the nearest field.
    """
    known = [item.name for item in fields(TrainConfig)]
    for name in values:
        if name not in known:
            raise ConfigError(f"{where}: unknown field {name!r:.80}{_nearest(name, known)}")
    try:
        return TrainConfig(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _nearest(name: str, known: list[str]) -> str:
    """A hint for an unknown field: the probable one, or those that begin with the same word, or the nearest."""
    close = [OTHER_NAMES[name]] if name in OTHER_NAMES else difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    if close:
        return f", did you mean {close[0]}? {ALL_FIELDS}"
    word = name.partition("_")[0]
    if akin := [item for item in known if item.partition("_")[0] == word]:
        return f"; those that begin with {word:.80} are {', '.join(akin)}; {ALL_FIELDS}"
    return f"; the nearest is {difflib.get_close_matches(name, known, n=1, cutoff=0)[0]}; {ALL_FIELDS}"


def load_config(path: str, overrides: Iterable[str] = ()) -> TrainConfig:
    """Reads a TOML file and applies the `field=value` overrides. Raises ConfigError for a fault in either."""
    try:
        values: dict[str, Any] = tomllib.loads(read_text_file(path, path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    for text in overrides:
        override(values, text)
    return from_mapping(values, path)


def override(values: dict[str, Any], text: str) -> None:
    """Applies `learning_rate=1e-3`, `model_config.hidden_size=64` or `train_file=["a", "b"]`.

    The value is TOML, or else a text.
    """
    name, equals, written = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set {text!r:.80} must be field=value")
    try:
        value: Any = tomllib.loads(f"value = {written}")["value"]
    except (ValueError, RecursionError):
        value = written.strip()
    table: dict[str, Any] = values
    *outer, last = name.strip().split(".")
    for part in outer:
        inner: Any = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"--set {text!r:.80}: {part} is not a table")
        table = cast("dict[str, Any]", inner)
    table[last] = value
