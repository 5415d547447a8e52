"""The step of a training's method. Plain texts and answers (sft) need none."""

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, Union

from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.config import TrainConfig
from ckdist.train.model import TrainedModel
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.preference_step import PreferenceStep, check_preferences
from ckdist.train.ranks import TrainingRanks

if TYPE_CHECKING:  # it imports the engine
    from ckdist.train.grpo_step import GrpoStep
    from ckdist.train.reward_step import RewardStep

MethodStep: TypeAlias = Union[PreferenceStep, "GrpoStep", "RewardStep"]


def check_method(config: TrainConfig, model: TrainedModel) -> None:
    """Raises ConfigError for settings that the method cannot be trained with."""
    if config.method == "grpo":
        from ckdist.train.grpo_step import check_grpo

        check_grpo(config, model.spec)
    elif config.method == "reward":
        from ckdist.train.reward_step import check_reward

        check_reward(config, model)
    elif config.method != "sft":
        check_preferences(config, model.spec)


def method_step(
    config: TrainConfig,
    executable: NativeExecutable,
    ranks: TrainingRanks,
    model: TrainedModel,
    tokenizer: Tokenizer,
    update: Callable[[float], object],
) -> MethodStep | None:
    """Makes the step. `update` updates the weights with the mean gradient over this number of tokens."""
    if config.method == "grpo":
        from ckdist.train.grpo_step import GrpoStep

        return GrpoStep(config, executable, ranks, model, tokenizer, update)
    if config.method == "reward":
        from ckdist.train.reward_step import RewardStep

        return RewardStep(executable, ranks)
    return None if config.method == "sft" else PreferenceStep(config, executable, ranks)
