"""Makes tests/golden/reward.npz: steps of a reward model by TRL's loss, on the tiny llama3 of make_golden.py.

pip install ckdist[golden] trl==1.16 && python tests/golden/make_reward_golden.py

ids             int32 (steps, sequences, tokens), padded by -1: chosen and rejected of each pair in turn
score           float32 (hidden,): the head before the steps
losses, norms   float64 (steps,): before each update of AdamW, the loss and the gradient's norm
rewards         float64 (steps, sequences)
score_after, embeddings_after  float32: the head, and the first 10 embeddings, after the steps

reward_lora.npz: the same for PEFT's adapter of rank 2 on all linears and the head. `start.NAME` are the matrices before
the steps. reward_adapter: the adapter after the steps, as PEFT saves it, and `after` the rewards of the first step.
"""

import json
from collections import defaultdict
from unittest.mock import MagicMock

import numpy as np
import torch
from make_training_golden import GOLDEN
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForSequenceClassification
from trl import RewardTrainer

STEPS, PAIRS, RATE, VOCAB, LENGTH = 4, 3, 5e-4, 200, 12


def main() -> None:
    make("reward", None)
    make("reward_lora", LoraConfig(task_type="SEQ_CLS", r=2, lora_alpha=4, target_modules="all-linear"))


def make(name: str, lora: LoraConfig | None) -> None:
    """Writes the file `name`."""
    rng = np.random.default_rng(21)
    ids = rng.integers(3, VOCAB, (STEPS, 2 * PAIRS, LENGTH)).astype(np.int32)
    ids[np.arange(LENGTH) >= rng.integers(3, LENGTH + 1, (STEPS, 2 * PAIRS, 1))] = -1
    model = AutoModelForSequenceClassification.from_pretrained(
        GOLDEN / "llama3", num_labels=1, dtype=torch.float32, attn_implementation="eager", pad_token_id=2
    ).eval()
    score = (0.3 * rng.standard_normal(model.config.hidden_size)).astype(np.float32)
    model.score.weight.data[:] = torch.from_numpy(score)
    start = {}
    if lora is not None:
        model = get_peft_model(model, lora)
        for key, value in model.named_parameters():
            if ".lora_" in key:
                value.data[:] = torch.from_numpy(0.1 * rng.standard_normal(value.shape).astype(np.float32))
                start[f"start.{key.removeprefix('base_model.model.').replace('.default', '')}"] = value.numpy(force=True)
    own = [value for value in model.parameters() if value.requires_grad]
    start = {key: value.copy() for key, value in start.items()}
    trainer = MagicMock()
    trainer.args.center_rewards_coefficient, trainer.args.use_liger_kernel = None, False
    trainer.aux_loss_enabled = False
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    optimizer = torch.optim.AdamW(own, lr=RATE, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8)
    found = defaultdict(list)
    for step in ids:
        order = np.concatenate([step[::2], step[1::2]])  # TRL has all chosen ones first
        inputs = {
            "input_ids": torch.from_numpy(np.where(order < 0, 2, order)).long(),
            "attention_mask": torch.from_numpy(order >= 0).long(),
        }
        optimizer.zero_grad()
        loss, outputs = RewardTrainer.compute_loss(trainer, model, inputs, return_outputs=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(own, float("inf"))
        rewards = outputs.logits.squeeze(-1).detach().numpy()
        found["losses"].append(loss.item())
        found["norms"].append(norm.item())
        found["rewards"].append(rewards.reshape(2, -1).T.ravel())
        optimizer.step()
    arrays = {name: np.array(values, np.float64) for name, values in found.items()}
    head = next(value for key, value in model.named_parameters() if value.requires_grad and "score" in key)
    arrays |= {"ids": ids, "score": score, "score_after": head.numpy(force=True)[0], **start}
    if lora is None:
        arrays["embeddings_after"] = model.model.embed_tokens.weight.detach().numpy()[:10]
    else:
        folder = GOLDEN / "reward_adapter"
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        config = json.loads((folder / "adapter_config.json").read_text()) | {"base_model_name_or_path": "llama3"}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
        step = ids[0]
        inputs = torch.from_numpy(np.where(step < 0, 2, step)).long()
        with torch.no_grad():
            scores = model(input_ids=inputs, attention_mask=torch.from_numpy(step >= 0).long()).logits
        arrays["after"] = scores.squeeze(-1).numpy()
    np.savez_compressed(GOLDEN / f"{name}.npz", **arrays)
    print(arrays["losses"], arrays["norms"])


if __name__ == "__main__":
    main()
