"""PEFT's adapter_config.json: the linears that have matrices, and their rank and scale."""

import math
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from ckdist.errors import ModelFileError
from ckdist.weights.json_file import read_json_object

CONFIG = "adapter_config.json"
NOTHING = (None, False, [], {}, "", "none")
MERGE = "merge it into its base with PEFT's merge_and_unload, and give that model"
# Values of init_lora_weights that do not change the base model. With the others, A and B belong to a changed base.
PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva", "mica")


class Rule(Enum):
    """Treatment of a field of adapter_config.json."""

    HONOURED = "honoured"
    REFUSED = "refused"  # null, false and empty values are allowed
    HARMLESS = "harmless"


# All fields of PEFT 0.21's LoraConfig. The text is the reason; for refused fields, the reason and the remedy.
FIELDS: Mapping[str, tuple[Rule, str]] = {
    "peft_type": (Rule.HONOURED, "must be LORA"),
    "r": (Rule.HONOURED, "the rank"),
    "lora_alpha": (Rule.HONOURED, "the scale is alpha / r"),
    "rank_pattern": (Rule.HONOURED, "r of the modules that a key matches"),
    "alpha_pattern": (Rule.HONOURED, "lora_alpha of the modules that a key matches"),
    "use_rslora": (Rule.HONOURED, "the scale is alpha / sqrt(r)"),
    "target_modules": (Rule.HONOURED, "modules with matrices"),
    "target_parameters": (Rule.HONOURED, "parameters with matrices: stacked experts"),
    "exclude_modules": (Rule.HONOURED, "modules without matrices"),
    "layers_to_transform": (Rule.HONOURED, "layers with matrices"),
    "layers_pattern": (Rule.HONOURED, "before the numbers that layers_to_transform counts"),
    "init_lora_weights": (Rule.HONOURED, "a start that changes the base is refused"),
    "bias": (Rule.REFUSED, f"biases were trained too: {MERGE}"),
    "lora_bias": (Rule.REFUSED, f"B has a bias: {MERGE}"),
    "modules_to_save": (Rule.REFUSED, f"whole modules were trained: {MERGE}"),  # but a reward model's head
    "trainable_token_indices": (Rule.REFUSED, f"rows of the embeddings were trained: {MERGE}"),
    "use_dora": (Rule.REFUSED, "DoRA scales whole matrices: merge it with ckdist merge, and give that model"),
    "use_qalora": (Rule.REFUSED, f"QALoRA pools the inputs: {MERGE}"),
    "use_bdlora": (Rule.REFUSED, f"BD-LoRA has block-diagonal matrices: {MERGE}"),
    "kasa_config": (Rule.REFUSED, f"KaSA changes the base: {MERGE}"),
    "monteclora_config": (Rule.REFUSED, f"MonteCLoRA samples its matrices: {MERGE}"),
    "velora_config": (Rule.REFUSED, f"VeLoRA stores further tensors: {MERGE}"),
    "arrow_config": (Rule.REFUSED, "Arrow routes between adapters: give one of these alone"),
    "alora_invocation_tokens": (Rule.REFUSED, "aLoRA begins after certain tokens: take an adapter without them"),
    "layer_replication": (Rule.REFUSED, f"layers are repeated: {MERGE}"),
    "megatron_config": (
        Rule.REFUSED,
        "layers of Megatron are not read: convert the adapter to PEFT's for transformers",
    ),
    "megatron_core": (Rule.HARMLESS, "read with megatron_config alone"),
    "qalora_group_size": (Rule.HARMLESS, "read with use_qalora alone"),
    "loftq_config": (Rule.HARMLESS, "read at the start of a training, for init_lora_weights = loftq"),
    "eva_config": (Rule.HARMLESS, "read at the start of a training; ranks that it chose are in rank_pattern"),
    "corda_config": (Rule.HARMLESS, "read at the start of a training, for init_lora_weights = corda"),
    "lora_ga_config": (Rule.HARMLESS, "read at the start of a training, for init_lora_weights = lora_ga"),
    "lora_dropout": (Rule.HARMLESS, "drops in training alone"),
    "fan_in_fan_out": (Rule.HARMLESS, "of GPT-2's layers; PEFT ignores it for linears, which all families here have"),
    "ensure_weight_tying": (Rule.HARMLESS, "of embeddings with matrices or in modules_to_save, which are refused"),
    "inference_mode": (Rule.HARMLESS, "whether PEFT freezes the matrices"),
    "task_type": (Rule.HARMLESS, "a task's own head is in modules_to_save"),
    "auto_mapping": (Rule.HARMLESS, "the Python class of the base"),
    "base_model_name_or_path": (Rule.HARMLESS, "-m names the base; shapes are compared"),
    "revision": (Rule.HARMLESS, "of the base's repository"),
    "peft_version": (Rule.HARMLESS, "the writer"),
}


class AdapterConfig:
    """adapter_config.json of a folder. Names of modules and parameters are PEFT's, without `base_model.model.`.

    Raises ModelFileError for a field that is malformed, not supported, or unknown and not empty.
    """

    def __init__(self, folder: Path, merging: bool = False):
        self.merging = merging  # magnitudes (DoRA) are honoured
        self.file = folder / CONFIG
        self.fields = read_json_object(self.file)
        self._check_fields()
        self._rank, self._alpha = self.fields["r"], float(self.fields["lora_alpha"])
        self._ranks = self._patterns("rank_pattern", "a positive whole number", lambda v: type(v) is int and v > 0)
        self._alphas = self._patterns("alpha_pattern", "a finite number", _is_finite)

    @property
    def has_head(self) -> bool:
        """True if a reward model's head was trained too. PEFT names both of its usual names."""
        saved = self.fields.get("modules_to_save")
        return self.fields.get("task_type") == "SEQ_CLS" and isinstance(saved, list) and "score" in saved

    def rank(self, name: str) -> int:
        """The rank of the matrices of a module or parameter."""
        return int(_first_match(self._ranks, name, self._rank))

    def scale(self, name: str) -> float:
        """The factor on B A of a module or parameter."""
        rank = self.rank(name)
        return _first_match(self._alphas, name, self._alpha) / (
            math.sqrt(rank) if self.fields.get("use_rslora") else rank
        )

    def is_module(self, name: str) -> bool:
        """True if the module has matrices."""
        if any(matches(name) for matches in self._excluded):
            return False
        if not self.fields.get("target_modules"):  # PEFT then has a default for each family
            return not self.fields.get("target_parameters")
        return any(matches(name) for matches in self._targets) and self._is_in_layers(name)

    def is_parameter(self, name: str) -> bool:
        """True if the parameter has matrices."""
        return any(matches(name) for matches in self._parameters)

    def _check_fields(self) -> None:
        fields = self.fields
        for name, value in fields.items():
            rule, reason = FIELDS.get(name, (Rule.REFUSED, "the field is not known: take a newer ckdist, or remove it"))
            read = (name == "use_dora" and self.merging) or (name == "modules_to_save" and self.has_head)
            if rule is Rule.REFUSED and value not in NOTHING and not read:
                raise self._error(name, f"which is not supported, since {reason}" if name in FIELDS else reason)
        if fields.get("peft_type", "LORA") != "LORA":
            raise self._error("peft_type", f"and only LORA is read: {MERGE}")
        start = fields.get("init_lora_weights")
        if (start.lower() if isinstance(start, str) else start) not in PLAIN_STARTS:
            raise self._error(
                "init_lora_weights",
                "which changes the base: save it with PEFT's path_initial_model_for_weight_conversion",
            )
        if fields.get("use_rslora") not in (None, True, False):
            raise self._error("use_rslora", "and must be true or false")
        rank = fields.get("r")
        if type(rank) is not int or rank < 1 or not _is_finite(fields.get("lora_alpha")):
            raise ModelFileError(f"{self.file} must have r, a whole number, and lora_alpha, a finite number")

    def _patterns(
        self, field: str, kind: str, is_valid: Callable[[Any], bool]
    ) -> list[tuple[Callable[[str], Any], float]]:
        """A pattern may match a whole name, or its end after a dot."""
        patterns = self.fields.get(field) or {}
        if not isinstance(patterns, dict) or not all(is_valid(value) for value in patterns.values()):
            raise self._error(field, f"and must map names to {kind}")
        return [(self._regex(field, rf"(.*\.)?({key})$").match, value) for key, value in patterns.items()]

    @cached_property
    def _targets(self) -> list[Callable[[str], Any]]:
        targets = self.fields.get("target_modules")
        if isinstance(targets, str) and targets.lower() == "all-linear":
            return [lambda name: name.rpartition(".")[2] != "lm_head"]
        return self._names("target_modules")

    @cached_property
    def _excluded(self) -> list[Callable[[str], Any]]:
        return self._names("exclude_modules")

    @cached_property
    def _parameters(self) -> list[Callable[[str], Any]]:
        if isinstance(self.fields.get("target_parameters"), str):
            raise self._error("target_parameters", "and must be a list of names")
        return self._names("target_parameters")

    def _names(self, field: str) -> list[Callable[[str], Any]]:
        """A string is a pattern for whole names. A list has whole names, or their ends after a dot."""
        value = self.fields.get(field) or []
        if isinstance(value, str):
            return [self._regex(field, value).fullmatch]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self._error(field, "and must be a list of names or a pattern")
        ends = tuple(f".{name}" for name in value)
        return [lambda name: f".{name}".endswith(ends)] if ends else []

    def _is_in_layers(self, name: str) -> bool:
        layers, patterns = self.fields.get("layers_to_transform"), self.fields.get("layers_pattern") or []
        if layers in (None, []) or isinstance(self.fields["target_modules"], str):
            return True
        layers = [layers] if type(layers) is int else layers
        patterns = [patterns] if isinstance(patterns, str) else patterns
        if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
            raise self._error("layers_to_transform", "and must be numbers of layers")
        if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
            raise self._error("layers_pattern", "and must be a list of names")
        forms = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]
        found = next((match for form in forms if (match := self._regex("layers_pattern", form).match(name))), None)
        return found is not None and int(found[found.re.groups]) in layers

    def _regex(self, field: str, pattern: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern)
        except (re.error, OverflowError, RecursionError) as e:
            raise self._error(field, f"and {pattern!r:.60} is no regular expression ({e})") from None

    def _error(self, field: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.file}: {field} is {self.fields.get(field)!r:.60}, {problem}")


def _first_match(patterns: list[tuple[Callable[[str], Any], float]], name: str, default: float) -> float:
    return next((value for matches, value in patterns if matches(name)), default)


def _is_finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
