"""One step of DPO, ORPO or KTO on this rank: log-probabilities, the loss of all replicas' units, and its gradients.

The loss depends on log-probabilities of tokens only. So a step computes these, then the loss's derivative by each of
them, and the backward pass has it as the weight of the token's cross-entropy.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ckdist.layout import even_ranges
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.data.preference_rows import PreferenceBatch, PreferenceRows
from ckdist.train.data.token_rows import Rows
from ckdist.train.methods import MethodStep
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.pipeline import StepSums
from ckdist.train.preference_loss import UnitLosses, dpo, kto, orpo
from ckdist.train.ranks import TrainingRanks


@dataclass(frozen=True)
class Measured:
    """Log-probabilities of a batch. Its arrays have a row per unit."""

    batch: PreferenceBatch
    tokens: np.ndarray  # float64 (tokens,): log-probabilities of targets
    policy: np.ndarray  # float64 (units, 2): sums over answers
    lengths: np.ndarray  # float64 (units, 2): tokens of answers
    learned: np.ndarray  # bool (tokens,): tokens of chosen sequences with a cross-entropy of their own


class Totals(NamedTuple):
    """Sums over the units of all replicas, and the divergence of KTO."""

    units: float
    losses: float  # without cross-entropy
    tokens: float  # with a cross-entropy of their own
    cross_entropy: float
    good: float  # rewards of chosen answers
    bad: float  # rewards of rejected answers
    chosen: float
    rejected: float
    right: float  # pairs whose chosen answer has the larger reward
    divergence: float


class PreferenceStep(MethodStep):
    """Computes losses and gradients of preferences."""

    def __init__(self, config: TrainConfig, executable: NativeExecutable, ranks: TrainingRanks) -> None:
        super().__init__(executable, ranks)
        self.config = config
        # The coefficient of the cross-entropy of chosen sequences.
        self.cross_entropy = 1.0 if config.method == "orpo" else config.rpo_alpha

    def measure_reference(self, *every: Rows) -> None:
        """Sets `reference` of all rows from the present weights. ORPO needs none."""
        mesh, per_device = self.ranks.mesh, self.config.per_device_train_batch_size
        for rows in every:
            if self.config.method == "orpo" or not isinstance(rows, PreferenceRows):
                continue
            begin, end = even_ranges(rows.count(0), mesh.size("dp"))[mesh.index("dp")]
            for first in range(begin, end, per_device):
                units = np.arange(first, min(end, first + per_device))
                rows.reference[units] = self._measure(rows.units_batch(units)).policy
            flat = self.ranks.sum_replicas(*rows.reference.ravel().tolist())
            rows.reference[:] = np.reshape(flat, rows.reference.shape)

    def forward_backward(self, batches: Sequence[PackedBatch], rows: Rows) -> StepSums:
        """Computes the gradients of the sum of losses over the units of all replicas, from zero, and reduces them."""
        began = time.perf_counter()
        measured = [self._measure(batch) for batch in batches]
        losses, totals = self._losses(measured, rows)
        factor = self.cross_entropy * totals.units / max(totals.tokens, 1.0)
        self.backward(_weighted(one, own, factor) for one, own in zip(measured, losses, strict=True))
        loss, metrics = self._metrics(totals)
        share = loss * totals.units if self.ranks.mesh.index("dp") == 0 else 0.0  # the caller sums over replicas
        units = sum(len(one.batch.units) for one in measured)
        return StepSums(share, 0.0, time.perf_counter() - began, units, metrics)

    def loss(self, batches: Sequence[PackedBatch], rows: Rows) -> float:
        """Returns the mean loss over the units of all replicas."""
        return self._metrics(self._losses([self._measure(batch) for batch in batches], rows)[1])[0]

    def _measure(self, batch: PackedBatch) -> Measured:
        assert isinstance(batch, PreferenceBatch), "rows of preferences make such batches"
        if not len(batch.units):
            return Measured(batch, np.zeros(1), np.zeros((0, 2)), np.zeros((0, 2)), np.zeros(1, bool))
        tokens = -self.executable.token_losses(batch).astype(np.float64)
        policy = np.add.reduceat(np.where(batch.answers, tokens, 0.0), batch.starts[:-1])
        lengths = np.add.reduceat(batch.answers.astype(np.float64), batch.starts[:-1])
        sequence = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))  # of each token
        learned = (sequence % 2 == 0) & (batch.targets >= 0) & (self.cross_entropy > 0)
        return Measured(batch, tokens, policy.reshape(-1, 2), lengths.reshape(-1, 2), learned)

    def _losses(self, measured: Sequence[Measured], rows: Rows) -> tuple[list[UnitLosses], Totals]:
        """The losses of this rank's units, and sums over the units of all replicas."""
        assert isinstance(rows, PreferenceRows), "only these have a reference"
        c, losses, own = self.config, [], np.zeros(len(Totals._fields) - 1)
        references = [rows.reference[one.batch.units] for one in measured]
        divergence = 0.0
        if c.method == "kto":
            pairs = zip(measured, references, strict=True)
            ratio = np.concatenate([one.policy[:, 1] - reference[:, 1] for one, reference in pairs])
            total, count = self.ranks.sum_replicas(float(ratio.sum()), len(ratio))
            divergence = max(0.0, total / max(count, 1.0))
        for one, reference in zip(measured, references, strict=True):
            good, ratios = one.batch.desirable, one.policy - reference
            is_good = is_bad = np.ones(len(ratios), bool)
            if c.method == "kto":
                factors = np.where(good, c.desirable_weight, c.undesirable_weight)
                losses.append(kto(ratios[:, 0], good, divergence, c.beta, factors))
                is_good, is_bad, ratios = good, ~good, ratios[:, [0, 0]]
            elif c.method == "orpo":
                losses.append(orpo(one.policy, one.lengths, c.beta))
                ratios = one.policy / one.lengths
            else:
                losses.append(dpo(one.policy, reference, one.lengths, c.beta, c.loss_type))
            rewards = c.beta * ratios
            own += [
                len(ratios), losses[-1].losses.sum(), one.learned.sum(), -one.tokens[one.learned].sum(),
                rewards[is_good, 0].sum(), rewards[is_bad, 1].sum(), is_good.sum(), is_bad.sum(),
                (rewards[:, 0] > rewards[:, 1]).sum(),
            ]  # fmt: skip
        return losses, Totals._make([*self.ranks.sum_replicas(*own.tolist()), divergence])

    def _metrics(self, of: Totals) -> tuple[float, dict[str, float]]:
        """The mean loss, and the metrics of a step by the names of TRL."""
        mean = of.cross_entropy / max(of.tokens, 1.0)
        metrics = {}
        if of.chosen:
            metrics["rewards/chosen"] = of.good / of.chosen
        if of.rejected:
            metrics["rewards/rejected"] = of.bad / of.rejected
        if of.chosen and of.rejected:
            metrics["rewards/margins"] = of.good / of.chosen - of.bad / of.rejected
        if self.config.method == "kto":
            metrics["kl"] = of.divergence
        else:
            metrics["rewards/accuracies"] = of.right / max(of.units, 1.0)
        if self.cross_entropy:
            metrics["nll_loss"] = mean
        return of.losses / max(of.units, 1.0) + self.cross_entropy * mean, metrics


def _weighted(one: Measured, own: UnitLosses, factor: float) -> PackedBatch:
    """The batch whose weighted cross-entropies have the gradient of the losses. `factor`: of the own cross-entropy."""
    batch = one.batch
    slopes = np.repeat(-own.slopes.ravel(), np.diff(batch.starts)) if len(batch.units) else 0.0
    weights = (np.where(batch.answers, slopes, 0.0) if len(batch.units) else np.zeros(1)) + factor * one.learned
    targets = np.where(weights != 0, batch.targets, -1)
    return PackedBatch(batch.token_ids, targets, batch.starts, weights.astype(np.float32))
