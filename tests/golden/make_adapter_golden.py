"""Makes tests/golden/adapters: gradients of LoRA's variants on the golden model qwen2, by PEFT in float64.

    pip install ckdist[golden] peft && python tests/golden/make_adapter_golden.py

    rslora, dora, dropout: CASE/loss  float64 (): the sum of the losses of batch 0 of tests/golden/training
                           CASE/value/NAME, CASE/gradient/NAME  float32: a trained tensor, and its gradient
                           keys  uint32 (tokens,): of the masks of `dropout`, see `mask`
    dora/       PEFT's folder of the adapter; logits.npy float32 (24, vocab) with it, of the first ids of qwen2/ids.npy
"""

import shutil
import zlib

import numpy as np
import torch
from make_training_golden import GOLDEN, in_float64, loss_sum
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

FAMILY, OUT = "qwen2", GOLDEN / "adapters"
FIELDS = {"r": 3, "lora_alpha": 5.0, "task_type": "CAUSAL_LM"}
TARGETS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
RATE, TOKENS = 0.3, 24
CASES = {"rslora": {"use_rslora": True}, "dora": {"use_dora": True}, "dropout": {"lora_dropout": RATE}}
BITS = (1 << 32) - 1


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & BITS
    x = (x ^ x >> 15) * 0x846CA68B & BITS
    return x ^ x >> 16


def mask(keys, name: str, columns: int) -> np.ndarray:
    """float64 (tokens, columns): 0, or 1 / (1 - rate), by a hash of the key, of the name of A, and of the column."""
    stream, least = zlib.crc32(name.encode()), round(RATE * 2**32)
    rows = [mixed(int(key) ^ stream) for key in keys]
    kept = [[mixed((row + column * 0x9E3779B9) & BITS) >= least for column in range(columns)] for row in rows]
    return np.array(kept) / (1 - RATE)


class Masked(torch.nn.Module):
    """The dropout of one linear, whose masks are given."""

    tokens: np.ndarray  # keys of the sequence that is computed

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x):
        return x * torch.from_numpy(mask(Masked.tokens, self.name, x.shape[-1]))


def short(name: str) -> str:
    """The name in the program."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    return name.removesuffix(".weight") if "magnitude" in name else name


def case(name: str, fields: dict, batches, keys) -> dict[str, np.ndarray]:
    model = get_peft_model(in_float64(FAMILY), LoraConfig(**FIELDS, target_modules=TARGETS, **fields)).double()
    generator, trained = torch.Generator().manual_seed(7), {}
    for full, p in model.named_parameters():
        if p.requires_grad:
            draw = torch.randn(p.shape, generator=generator, dtype=torch.float64).float().double()
            p.data = p.data.float().double() * (1 + 0.1 * draw) if "magnitude" in full else 0.2 * draw
            p.data = p.data.float().double()
            trained[short(full)] = p
    if name == "dora":
        save(model)
    if name == "dropout":
        for full, module in list(model.named_modules()):
            if hasattr(module, "lora_dropout") and "default" in getattr(module, "lora_dropout", {}):
                module.lora_dropout["default"] = Masked(f"{short(full)}.lora_A.weight")
    starts, inner = batches["starts"][0], model.forward
    begin = iter(starts[:-1])

    def forward(ids, **more):
        first = next(begin)
        Masked.tokens = keys[first : first + ids.shape[1]]
        return inner(ids, **more)

    loss = loss_sum(forward, batches, 0)
    loss.backward()
    found = {f"{name}/loss": np.float64(loss.item())}
    for own, p in trained.items():
        found[f"{name}/value/{own}"] = p.detach().float().numpy()
        found[f"{name}/gradient/{own}"] = p.grad.float().numpy()
    return found


def save(model) -> None:
    shutil.rmtree(OUT / "dora", ignore_errors=True)
    model.float().peft_config["default"].base_model_name_or_path = FAMILY
    model.save_pretrained(OUT / "dora")
    model.double()
    (OUT / "dora" / "README.md").unlink(missing_ok=True)
    base = AutoModelForCausalLM.from_pretrained(GOLDEN / FAMILY, dtype=torch.float32, attn_implementation="eager")
    ids = torch.from_numpy(np.load(GOLDEN / FAMILY / "ids.npy")[:TOKENS]).long()
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, OUT / "dora").eval()(ids[None], use_cache=False).logits[0]
    np.save(OUT / "dora" / "logits.npy", logits.numpy())


def main() -> None:
    OUT.mkdir(exist_ok=True)
    batches = dict(np.load(GOLDEN / "training" / "batches.npz"))
    keys = np.random.default_rng(9).integers(0, 1 << 32, batches["token_ids"].shape[1], np.uint32)
    arrays = {"keys": keys}
    for name, fields in CASES.items():
        arrays |= case(name, fields, batches, keys)
    np.savez_compressed(OUT / "gradients.npz", **arrays)


if __name__ == "__main__":
    main()
