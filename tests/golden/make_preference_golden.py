"""Makes tests/golden/preferences.npz: steps of DPO, ORPO and KTO by TRL, on the tiny llama3 of make_golden.py.

    pip install ckdist[golden] trl==1.16 && python tests/golden/make_preference_golden.py

AdamW with a constant rate, float32, one batch a step. Of each case NAME:
    NAME/ids, answers    int32, uint8 (steps, sequences, tokens): padded by -1; the answer's tokens
    NAME/desirable       uint8 (steps, units), of KTO
    NAME/losses, norms   float64 (steps,): before each update, the loss and the gradient's norm before clipping
    NAME/rewards         float64 (steps, 2): chosen, rejected
    NAME/weights         float32: the model's embeddings of the first 10 tokens after the steps
Sequences 2 i and 2 i + 1 are those of a unit: chosen and rejected, or of KTO the answer and the mismatched one.
"""

import tempfile
import warnings
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

GOLDEN = Path(__file__).parent
STEPS, UNITS, RATE, VOCAB = 4, 4, 5e-4, 200
CASES = {
    "sigmoid": ("dpo", {"loss_type": ["sigmoid"], "beta": 0.3}),
    "hinge": ("dpo", {"loss_type": ["hinge"], "beta": 0.3}),
    "ipo": ("dpo", {"loss_type": ["ipo"], "beta": 0.5}),
    "rpo": ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.7], "beta": 0.3}),
    "orpo": ("orpo", {"beta": 0.3}),
    "kto": ("kto", {"beta": 0.3, "desirable_weight": 1.0, "undesirable_weight": 1.5}),
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token: "w17" is 17."""
    words = {"<unknown>": 0, "<end>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, VOCAB)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<pad>", bos_token=None)


def make_records(method: str) -> list[dict]:
    rng = np.random.default_rng(11)
    words = lambda low, high: " ".join(f"w{i}" for i in rng.integers(3, VOCAB, rng.integers(low, high)))
    records = []
    for index in range(STEPS * UNITS):
        prompt = words(2, 9)
        if method == "kto":
            records.append({"prompt": prompt, "completion": " " + words(1, 10), "label": bool(index % 3)})
        else:
            records.append({"prompt": prompt, "chosen": " " + words(1, 10), "rejected": " " + words(1, 10)})
    return records


def batch_of(method: str, inputs: dict) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Sequences and answers' masks of a batch, in the order of units."""
    if method == "orpo":
        pairs = []
        for name in ("chosen", "rejected"):
            keep = inputs[f"{name}_attention_mask"].bool()
            pairs.append((inputs[f"{name}_input_ids"], keep, inputs[f"{name}_labels"] != -100))
    elif method == "kto":
        pairs = [
            (inputs[f"{p}input_ids"], inputs[f"{p}attention_mask"].bool(), inputs[f"{p}completion_mask"].bool())
            for p in ("", "KL_")
        ]
    else:
        whole = inputs["input_ids"], inputs["attention_mask"].bool(), inputs["completion_mask"].bool()
        pairs = list(zip(*(part.chunk(2) for part in whole), strict=True))
    ids, answers = [], []
    for unit in range(len(pairs[0][0])):
        for tokens, keep, answer in pairs:
            ids.append(tokens[unit][keep[unit]].numpy())
            answers.append(answer[unit][keep[unit]].numpy())
    return ids, answers


def run(name: str) -> dict[str, np.ndarray]:
    method, options = CASES[name]
    trainer_class, config_class = {
        "dpo": (DPOTrainer, DPOConfig), "orpo": (ORPOTrainer, ORPOConfig), "kto": (KTOTrainer, KTOConfig),
    }[method]  # fmt: skip
    found = {"ids": [], "answers": [], "losses": [], "norms": [], "rewards": [], "desirable": []}

    class Recorder(trainer_class):
        def compute_loss(self, model, inputs, *args, **kwargs):
            ids, answers = batch_of(method, inputs)
            found["ids"].append(ids)
            found["answers"].append(answers)
            if method == "kto":
                found["desirable"].append(np.array(inputs["label"], np.uint8))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def log(self, logs, *args, **kwargs):
            super().log(logs, *args, **kwargs)
            entry = self.state.log_history[-1]
            if "loss" in entry:
                found["losses"].append(entry["loss"])
                found["norms"].append(entry["grad_norm"])
                found["rewards"].append([entry.get("rewards/chosen", np.nan), entry.get("rewards/rejected", np.nan)])

    model = AutoModelForCausalLM.from_pretrained(GOLDEN / "llama3", dtype=torch.float32, attn_implementation="eager")
    with tempfile.TemporaryDirectory() as folder:
        shared = {
            "output_dir": folder, "per_device_train_batch_size": UNITS, "max_steps": STEPS, "learning_rate": RATE,
            "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "save_strategy": "no",
            "max_length": 64, "use_cpu": True, "bf16": False, "fp16": False, "gradient_checkpointing": False,
            "adam_beta2": 0.999, "weight_decay": 0.0, "max_grad_norm": 1.0, "disable_tqdm": True,
        }  # fmt: skip
        if method == "orpo":
            shared["max_completion_length"] = 32
        trainer = Recorder(
            model=model, args=config_class(**shared, **options), train_dataset=Dataset.from_list(make_records(method)),
            processing_class=make_tokenizer(),
        )  # fmt: skip
        trainer.train()
    longest = max(len(ids) for step in found["ids"] for ids in step)
    padded = lambda steps, fill, dtype: np.array(
        [[np.pad(row.astype(dtype), (0, longest - len(row)), constant_values=fill) for row in step] for step in steps]
    )
    result = {name: np.array(found[name], np.float64) for name in ("losses", "norms", "rewards")}
    result |= {"ids": padded(found["ids"], -1, np.int32), "answers": padded(found["answers"], 0, np.uint8)}
    if method == "kto":
        result["desirable"] = np.array(found["desirable"])
    result["weights"] = model.get_input_embeddings().weight.detach().numpy()[:10].copy()
    return result


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    arrays = {f"{name}/{key}": value for name in CASES for key, value in run(name).items()}
    np.savez_compressed(GOLDEN / "preferences.npz", **arrays)
