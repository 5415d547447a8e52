"""The steps of a training's methods. Plain texts and answers (sft) need none."""

from collections.abc import Callable, Iterable, Sequence

from ckdist.errors import ConfigError
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.data.batches import FileBatches, OwnBatches
from ckdist.train.data.token_rows import Rows
from ckdist.train.model import TrainedModel
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.pipeline import StepSums
from ckdist.train.ranks import TrainingRanks


class MethodStep:
    """Computes the losses and gradients of a step. All ranks call its functions together."""

    def __init__(self, executable: NativeExecutable, ranks: TrainingRanks) -> None:
        self.executable, self.ranks = executable, ranks

    def measure_reference(self, *every: Rows) -> None:
        """Sets the reference of all rows from the present weights. Default: rows have none."""

    def take(self, batches: FileBatches | OwnBatches) -> list[PackedBatch]:
        """This rank's batches of the next step."""
        return batches.take()

    def forward_backward(self, batches: Sequence[PackedBatch], rows: Rows) -> StepSums:
        """Computes the gradients of the sum of this step's losses, from zero, and reduces them."""
        raise NotImplementedError

    def loss(self, batches: Sequence[PackedBatch], rows: Rows) -> float:
        """The mean loss of held-out rows over all replicas."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the step's own engine, if it has one."""

    def backward(self, batches: Iterable[PackedBatch]) -> None:
        """Computes the gradients of the sum of weighted losses, from zero, and reduces them."""
        self.executable.zero_grad()
        *first, last = batches
        for batch in first:
            self.executable.forward_backward(batch, False)
        self.executable.forward_backward(last, True)
        self.executable.flush()


def check_method(config: TrainConfig, model: TrainedModel) -> None:
    """Raises ConfigError for settings that the method cannot be trained with."""
    method = config.method
    if method == "sft":
        return
    divided = {"pipeline_parallel_size": "all layers: use tensor_parallel_size"}
    if method in ("grpo", "reward"):
        divided = dict.fromkeys([*divided, "tensor_parallel_size"], "the whole model: use replicas (-dp)")
    for name, needed in divided.items():
        if (given := getattr(config, name)) > 1:
            raise ConfigError(f"{name} ({given}) must be 1 for method {method}, whose ranks need {needed}")
    if coefficient := model.spec.balance_coefficient:
        raise ConfigError(
            f"method {method} has no load-balancing loss, and the coefficient is {coefficient:g}: "
            "set router_aux_loss_coef to 0"
        )
    if method == "grpo":
        from ckdist.train.grpo_step import check_grpo

        check_grpo(config)
    elif method == "reward":
        from ckdist.train.reward_step import check_reward

        check_reward(config, model)


def method_step(
    config: TrainConfig,
    executable: NativeExecutable,
    ranks: TrainingRanks,
    model: TrainedModel,
    tokenizer: Tokenizer,
    update: Callable[[float], object],
) -> MethodStep | None:
    """Makes the step. `update` updates the weights with the mean gradient over this number of tokens."""
    if config.method == "sft":
        return None
    if config.method == "grpo":
        from ckdist.train.grpo_step import GrpoStep

        return GrpoStep(config, executable, ranks, model, tokenizer, update)
    if config.method == "reward":
        from ckdist.train.reward_step import RewardStep

        return RewardStep(executable, ranks)
    from ckdist.train.preference_step import PreferenceStep

    return PreferenceStep(config, executable, ranks)
