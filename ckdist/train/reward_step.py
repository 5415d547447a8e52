"""One step of a reward model on this rank: rewards of pairs, the loss of Bradley and Terry, and its gradients.

The head is a matrix with the rows of two labels; the second row stays zero. So the loss of a token with label 0 is
-log sigmoid(reward), and with label 1 it is -log sigmoid(-reward).
"""

import time
from collections.abc import Sequence

import numpy as np

from ckdist.errors import ConfigError
from ckdist.models.decoder import SCORE
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.data.preference_rows import PreferenceBatch
from ckdist.train.data.token_rows import Rows
from ckdist.train.methods import MethodStep
from ckdist.train.model import TrainedModel
from ckdist.train.pipeline import StepSums
from ckdist.train.preference_loss import sigmoid


class RewardStep(MethodStep):
    """Computes losses and gradients of pairs."""

    def rewards(self, batch: PackedBatch) -> np.ndarray:
        """The reward of each sequence, float64 (units, 2)."""
        if not isinstance(batch, PreferenceBatch) or not len(batch.units):
            return np.zeros((0, 2))
        other = PackedBatch(batch.token_ids, np.where(batch.targets == 0, 1, -1).astype(np.int32), batch.starts)
        losses = [self.executable.token_losses(one).astype(np.float64) for one in (batch, other)]
        return (losses[1] - losses[0])[batch.starts[1:] - 1].reshape(-1, 2)

    def forward_backward(self, batches: Sequence[PackedBatch], rows: Rows) -> StepSums:  # noqa: ARG002
        """Computes the gradients of the sum of losses over pairs, from zero, and reduces them."""
        began = time.perf_counter()
        rewards = [self.rewards(batch) for batch in batches]
        self.backward(map(_weighted, batches, rewards))
        self.executable.gradients[SCORE][1] = 0
        pairs = np.concatenate(rewards)
        metrics = self._metrics(pairs)[1]
        return StepSums(float(_losses(pairs).sum()), 0.0, time.perf_counter() - began, len(pairs), metrics)

    def loss(self, batches: Sequence[PackedBatch], rows: Rows) -> float:  # noqa: ARG002
        """Returns the mean loss over the pairs of all replicas."""
        return self._metrics(np.concatenate([np.zeros((0, 2)), *(self.rewards(batch) for batch in batches)]))[0]

    def _metrics(self, pairs: np.ndarray) -> tuple[float, dict[str, float]]:
        """The mean loss over the pairs of all replicas, and metrics by the names of TRL."""
        margin = pairs[:, 0] - pairs[:, 1]
        own = _losses(pairs).sum(), len(pairs), (margin > 0).sum(), margin.sum(), pairs.sum()
        loss, count, right, apart, total = self.ranks.sum_replicas(*map(float, own))
        count = max(count, 1.0)
        return loss / count, {"accuracy": right / count, "margin": apart / count, "mean_reward": total / (2 * count)}


def _losses(pairs: np.ndarray) -> np.ndarray:
    """-log sigmoid(chosen - rejected) (Bradley and Terry 1952), (units,)."""
    return np.logaddexp(0.0, pairs[:, 1] - pairs[:, 0])


def _weighted(batch: PackedBatch, rewards: np.ndarray) -> PackedBatch:
    """The batch whose weighted cross-entropies have the gradient of the pairs' losses.

    A token has the less probable label, so that its own derivative by the reward is at least 1/2.
    """
    if not len(rewards):
        return PackedBatch(batch.token_ids, batch.targets, batch.starts)
    slopes = (-sigmoid(rewards[:, 1] - rewards[:, 0])[:, None] * [1.0, -1.0]).ravel()
    flat, ends = rewards.ravel(), batch.starts[1:] - 1
    targets, weights = batch.targets.copy(), np.zeros(len(batch.token_ids), np.float32)
    targets[ends] = flat > 0
    weights[ends] = slopes * np.where(flat > 0, 1, -1) / sigmoid(np.abs(flat))
    return PackedBatch(batch.token_ids, targets, batch.starts, weights)


def check_reward(config: TrainConfig, model: TrainedModel) -> None:
    """Raises ConfigError for settings that a reward model cannot be trained with."""
    if model.checkpoint is None or (model.checkpoint.format == "gguf" and not config.lora_r):
        raise ConfigError(
            "method reward continues from a model, and trains all weights of a folder with safetensors alone: set "
            "model_name_or_path, or lora_r"
        )
