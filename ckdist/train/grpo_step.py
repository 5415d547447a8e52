"""One step of GRPO on this rank: answers of the engine, their rewards, the clipped loss and its gradients."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ckdist.errors import ConfigError
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.train.batch import PackedBatch
from ckdist.train.config import TrainConfig
from ckdist.train.data.batches import FileBatches, OwnBatches
from ckdist.train.data.prompt_rows import PromptBatch
from ckdist.train.data.token_rows import Rows
from ckdist.train.grpo_loss import TokenLosses, advantages, grpo
from ckdist.train.methods import MethodStep
from ckdist.train.model import TrainedModel
from ckdist.train.native_executable import NativeExecutable
from ckdist.train.pipeline import StepSums
from ckdist.train.ranks import TrainingRanks
from ckdist.train.rewards import open_reward
from ckdist.train.rollouts import Rollouts, Sampled


@dataclass(frozen=True, kw_only=True)
class AnswerBatch(PackedBatch):
    """Prompts with sampled answers. Only the answers' tokens are targets."""

    gains: np.ndarray  # float64 (tokens,): the advantage of the token's sequence
    sampled: np.ndarray  # float32 (tokens,): the engine's log-probabilities; NaN: it gave none
    rewards: np.ndarray  # float64 (sequences,)
    ended: int  # answers that ended by themselves


class GrpoStep(MethodStep):
    """Samples answers and computes losses and gradients. It holds nothing out, so it has no `loss`.

    Args:
        update: Updates the weights between iterations, with the mean over this number of tokens.
    """

    def __init__(
        self,
        config: TrainConfig,
        executable: NativeExecutable,
        ranks: TrainingRanks,
        model: TrainedModel,
        tokenizer: Tokenizer,
        update: Callable[[float], object],
    ) -> None:
        assert model.lora is not None and model.checkpoint is not None, "check_grpo requires both"
        super().__init__(executable, ranks)
        self.config, self.tokenizer, self.update = config, tokenizer, update
        self.reward = open_reward(config.reward)
        self.rollouts = Rollouts(config, model.checkpoint.path, model.lora, executable.pool.threads)

    def take(self, batches: FileBatches | OwnBatches) -> list[PackedBatch]:
        """This rank's prompts of the next step, with sampled answers. Raises ConfigError if a reward fails."""
        self.rollouts.load(self.executable.parameters)
        return [self._answered(batch) for batch in batches.take() if isinstance(batch, PromptBatch)]

    def _answered(self, batch: PromptBatch) -> AnswerBatch:
        bounds = zip(batch.starts[:-1], batch.starts[1:], strict=True)
        prompts = [batch.token_ids[begin:end] for begin, end in bounds]
        samples = self.rollouts.sample(prompts, batch.seeds)
        rewards = np.zeros((len(prompts), self.config.num_generations))
        for at, (prompt, own) in enumerate(zip(prompts, samples, strict=True)):
            asked, expected = (
                self.tokenizer.decode(ids.tolist(), skip_special=True) for ids in (prompt, batch.expected[at])
            )
            answers = [self.tokenizer.decode(one.tokens, skip_special=True) for one in own]
            rewards[at] = [self.reward(asked, answer, expected) for answer in answers]
        sequences = [(prompt, one) for prompt, own in zip(prompts, samples, strict=True) for one in own]
        return packed(sequences, rewards)

    def forward_backward(self, batches: Sequence[PackedBatch], rows: Rows) -> StepSums:  # noqa: ARG002
        """Computes the gradients of the sum of losses over the answers' tokens, from zero, and reduces them.

        All iterations but the last one update the weights too.
        """
        began, c = time.perf_counter(), self.config
        answers = [batch for batch in batches if isinstance(batch, AnswerBatch)]
        tokens = sum(int((batch.targets >= 0).sum()) for batch in answers)
        before = [self._logprobs(batch) for batch in answers]
        references = [self._reference(batch) if c.kl_coef else None for batch in answers]
        (total,) = self.ranks.sum_replicas(tokens)
        policy, losses = before, list[TokenLosses]()
        for iteration in range(c.num_iterations):
            if iteration:
                self.update(total)
                policy = [self._logprobs(batch) for batch in answers]
            measured = zip(answers, policy, before, references, strict=True)
            losses = [grpo(now, old, base, own.gains, c.epsilon, c.kl_coef) for own, now, old, base in measured]
            self.backward(map(_weighted, answers, losses))
        loss, metrics = self._metrics(answers, before, losses)
        return StepSums(loss, 0.0, time.perf_counter() - began, tokens, metrics)

    def close(self) -> None:
        """Frees the engine."""
        self.rollouts.close()

    def _logprobs(self, batch: PackedBatch) -> np.ndarray:
        return -self.executable.token_losses(batch).astype(np.float64)

    def _reference(self, batch: PackedBatch) -> np.ndarray:
        """Log-probabilities of the base: with B = 0."""
        kept = self.executable.parameters.flat.copy()
        for name, view in self.executable.parameters.items():
            if ".lora_B." in name:
                view[:] = 0
        found = self._logprobs(batch)
        self.executable.parameters.flat[:] = kept
        return found

    def _metrics(
        self, answers: Sequence[AnswerBatch], before: Sequence[np.ndarray], losses: Sequence[TokenLosses]
    ) -> tuple[float, dict[str, float]]:
        """This rank's sum of losses, and the metrics over all replicas."""
        own, largest = np.zeros(10), 0.0
        for batch, logprobs, of in zip(answers, before, losses, strict=True):
            learned, known = batch.targets >= 0, np.isfinite(batch.sampled)
            apart = np.abs(logprobs - batch.sampled)[known]
            groups = batch.rewards.reshape(-1, self.config.num_generations)
            deviation = groups.std(axis=1, ddof=1).sum() if groups.size else 0.0
            own += [
                of.losses[learned].sum(), learned.sum(), len(batch.rewards), batch.rewards.sum(), deviation,
                len(groups), of.divergences[learned].sum(), of.is_clipped[learned].sum(), apart.sum(), known.sum(),
            ]  # fmt: skip
            largest = max(largest, float(apart.max(initial=0.0)))
        ended = sum(batch.ended for batch in answers)
        _, tokens, count, reward, deviation, groups, kl, clipped, apart, known, ended = self.ranks.sum_replicas(
            *own.tolist(), ended
        )
        data = self.ranks.data
        largest = largest if data is None else float(data.all_gather(np.array([largest])).max())
        metrics = {
            "reward": reward / max(count, 1), "reward_std": deviation / max(groups, 1),
            "completions/mean_length": tokens / max(count, 1), "completions/ended": ended / max(count, 1),
            "clip_ratio": clipped / max(tokens, 1),
            "sampling/mean_difference": apart / max(known, 1), "sampling/largest_difference": largest,
        }  # fmt: skip
        if self.config.kl_coef:
            metrics["kl"] = kl / max(tokens, 1)
        return float(own[0]), metrics


def _weighted(batch: AnswerBatch, losses: TokenLosses) -> PackedBatch:
    """The batch whose weighted cross-entropies have the gradient of the losses."""
    slopes = np.where(batch.targets >= 0, losses.slopes, 0.0)
    targets = np.where(slopes != 0, batch.targets, -1)
    return PackedBatch(batch.token_ids, targets, batch.starts, (-slopes).astype(np.float32))


def packed(sequences: Sequence[tuple[np.ndarray, Sampled]], rewards: np.ndarray) -> AnswerBatch:
    """The batch of prompts with their answers. `rewards`: (prompts, samples)."""
    if not sequences:
        one = np.zeros(1, np.int32)
        empty, starts = np.zeros(1), np.array([0, 1], np.int32)
        return AnswerBatch(one, one - 1, starts, gains=empty, sampled=np.full(1, np.nan), rewards=np.zeros(0), ended=0)
    gains, ids, targets, sampled = advantages(rewards).ravel(), [], [], []
    for prompt, one in sequences:
        whole = np.concatenate([prompt, np.array(one.tokens, np.int32)])
        ids.append(whole[:-1])
        following = whole[1:].copy()
        following[: len(prompt) - 1] = -1
        targets.append(following)
        given = np.full(len(following), np.nan, np.float32)
        given[len(prompt) - 1 :][: len(one.logprobs)] = one.logprobs
        sampled.append(given)
    sizes = [len(own) for own in ids]
    return AnswerBatch(
        np.concatenate(ids).astype(np.int32),
        np.concatenate(targets).astype(np.int32),
        np.cumsum([0, *sizes]).astype(np.int32),
        gains=np.repeat(gains, sizes),
        sampled=np.concatenate(sampled),
        rewards=rewards.ravel(),
        ended=sum(one.has_end for _, one in sequences),
    )


def check_grpo(config: TrainConfig) -> None:
    """Raises ConfigError for settings that GRPO cannot be trained with."""
    for name in ("use_dora", "validation_file"):
        if given := getattr(config, name):
            raise ConfigError(f"{name} ({given}) is not supported with method grpo: leave it out")
    if not config.lora_r:
        raise ConfigError("method grpo needs lora_r: the engine that samples gets the adapter after each step")
    open_reward(config.reward)
