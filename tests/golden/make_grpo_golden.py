"""Makes tests/golden/grpo.npz: the loss of GRPO and its gradients by TRL's own function, in float64.

    pip install ckdist[golden] trl==1.16 && python tests/golden/make_grpo_golden.py

    policy, before, reference   float64 (sequences, tokens): log-probabilities
    mask, rewards               bool (sequences, tokens); float64 (groups, samples)
    advantages                  float64 (sequences,)
    CASE/loss, CASE/gradient    float64: of the mean over all tokens (TRL's default), by `policy`
"""

from collections import defaultdict
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from make_training_golden import GOLDEN
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

GROUPS, SAMPLES, TOKENS = 3, 4, 9
CASES = {"plain": {"beta": 0.0}, "kl": {"beta": 0.3}}


def trainer(beta: float, policy: torch.Tensor) -> MagicMock:
    """What the function reads of a trainer. `policy` is its model's result."""
    own = MagicMock()
    own.aux_loss_enabled, own.top_entropy_quantile, own.off_policy_mask_threshold = False, 1.0, None
    own.importance_sampling_level, own.loss_type, own.beta = "token", "dapo", beta
    own.epsilon_low = own.epsilon_high = 0.2
    own.use_vllm, own._entropy_bonus_enabled = False, False
    own.args = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    own.accelerator.num_processes, own.current_gradient_accumulation_steps = 1, 1
    own.accelerator.gather = own.accelerator.gather_for_metrics = lambda x: x
    own._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    own._get_per_token_logps_and_entropies = lambda *_, **__: (policy, torch.zeros_like(policy), None)
    return own


def main() -> None:
    rng = np.random.default_rng(3)
    shape = GROUPS * SAMPLES, TOKENS
    policy = -rng.exponential(1.5, shape)
    before, reference = (policy + rng.normal(0, scale, shape) for scale in (0.25, 0.5))
    mask = np.arange(TOKENS) < rng.integers(1, TOKENS + 1, (GROUPS * SAMPLES, 1))
    rewards = rng.normal(0.5, 1, (GROUPS, SAMPLES)).round(1)
    rewards[1] = 0.7  # a group without differences
    given = torch.from_numpy(rewards)
    gains = ((given - given.mean(1, keepdim=True)) / (nanstd(given, dim=1)[:, None] + 1e-4)).ravel()
    arrays = {"policy": policy, "before": before, "reference": reference, "mask": mask, "rewards": rewards}
    arrays["advantages"] = gains.numpy()
    for name, fields in CASES.items():
        own = torch.from_numpy(policy).requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(len(mask), 1), "prompt_mask": torch.ones(len(mask), 1),
            "completion_ids": torch.zeros(shape), "completion_mask": torch.from_numpy(mask).double(),
            "advantages": gains, "old_per_token_logps": torch.from_numpy(before),
            "ref_per_token_logps": torch.from_numpy(reference), "num_items_in_batch": torch.tensor(float(mask.sum())),
        }  # fmt: skip
        loss = GRPOTrainer._compute_loss(trainer(fields["beta"], own), MagicMock(training=True), inputs)
        loss.backward()
        arrays |= {f"{name}/loss": np.float64(loss.item()), f"{name}/gradient": own.grad.numpy()}
        print(name, loss.item())
    np.savez_compressed(GOLDEN / "grpo.npz", **arrays)


if __name__ == "__main__":
    main()
