"""Settings that differ from those of the checkpoint: refused, logged, or without effect."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckdist.errors import ConfigError
from ckdist.train.config import TrainConfig
from ckdist.train.schedule import Schedule
from ckdist.train.training_checkpoint import TrainState

# After such a change, the learned weights or the position in the data would have another meaning.
REFUSED = {
    "model_config": "it would be another model",
    "rope_scaling": "positions would be rotated by other angles",
    "lora_r": "the matrices would have other shapes",
    "lora_alpha": "the learned matrices would be scaled by another factor",
    "use_rslora": "the learned matrices would be scaled by another factor",
    "use_dora": "the magnitudes would be missing",
    "lora_target_modules": "other layers would have matrices",
    "method": "the loss would be another",
    "max_length": "the position in the data counts rows of max_length",
    "train_file_weights": "an epoch would have other documents, and the position in the data would move",
    "validation_split_percentage": "held-out documents would be trained on, and the position in the data would move",
    "seed": "the order of the data would be another",
    "optim": "the optimizer's state would be another",
    "weights_dtype": "the weights would be rounded, or their rounding would end",
}
# Changes of these are logged once, with both values.
NAMED = (
    "model_name_or_path", "num_train_epochs", "max_steps", "validation_file", "per_device_train_batch_size",
    "gradient_accumulation_steps", "global_batch_size", "learning_rate", "weight_decay", "adam_beta1", "adam_beta2",
    "adam_epsilon", "momentum", "muon_momentum", "max_grad_norm", "on_nan", "on_spike",
    "lr_scheduler_type", "warmup_steps", "warmup_ratio",
    "num_decay_steps", "min_lr_ratio", "router_aux_loss_coef", "bf16", "beta", "teacher_file", "teacher_weight",
    "loss_type", "rpo_alpha", "desirable_weight",
    "undesirable_weight", "lora_dropout", "reward", "num_generations", "max_completion_length", "num_iterations",
    "epsilon", "kl_coef",
)  # fmt: skip
SCHEDULE = ("learning_rate", "lr_scheduler_type", "warmup_steps", "warmup_ratio", "num_decay_steps", "min_lr_ratio")


def settings_of(config: TrainConfig) -> dict[str, Any]:
    """The configuration in the form that JSON stores."""
    settings = config.as_dict()
    if config.validation_file:
        settings["validation_split_percentage"] = 0.0
    return json.loads(json.dumps(settings))


def check_settings(config: TrainConfig, saved: TrainState, checkpoint: Path) -> None:
    """Raises ConfigError for a change of a setting in `REFUSED`."""
    for name, old, new in _changes(config, saved):
        if name in REFUSED:
            raise ConfigError(
                f"{checkpoint} was trained with {name} {old}, and {name} is {new}: {REFUSED[name]}; "
                "set the same, or another output_dir"
            )


def changed_settings(config: TrainConfig, saved: TrainState, state: TrainState) -> str:
    """Describes the changes since the checkpoint `saved`, with both values; empty if there are none.

    `state` has the steps that are planned now.
    """
    lines = [f"{name} {old} → {new}" for name, old, new in _changes(config, saved) if name in NAMED]
    if saved.rows_of_step and saved.rows_of_step != state.rows_of_step:
        lines.append(f"rows of a step {saved.rows_of_step} → {state.rows_of_step}")
    if saved.steps != state.steps:
        lines.append(f"steps {saved.steps} → {state.steps}")
    before = replace(config, **{name: saved.settings[name] for name in SCHEDULE if name in saved.settings})
    expected = Schedule(before, saved.steps).rate(min(saved.step, saved.steps - 1))
    rate = Schedule(config, state.steps).rate(min(saved.step, state.steps - 1))
    if lines and abs(rate - expected) > 0.01 * expected:
        lines.append(f"learning rate of the next step {expected:.3g} → {rate:.3g}")
    return f"was trained with other settings: {', '.join(lines)}" if lines else ""


def _changes(config: TrainConfig, saved: TrainState) -> list[tuple[str, Any, Any]]:
    """(name, saved value, present value) of the settings that differ."""
    now = settings_of(config)
    return [(name, old, now[name]) for name, old in saved.settings.items() if name in now and old != now[name]]
