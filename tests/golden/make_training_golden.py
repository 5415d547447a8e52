"""Makes the golden numbers of training: gradients and 20 steps of loss of each tiny model of make_golden.py, by PyTorch
in float64.

    pip install ckdist[golden] && python tests/golden/make_training_golden.py

tests/golden/training holds
    batches.npz    token_ids, targets int32 (batches, tokens), -1 where no loss is taken; starts int32 (batches, sequences + 1)
    FAMILY.npz     losses     float64 (20,): before each step of AdamW the mean loss over the targets of batch `step % batches`
                   loss       float64 (): the sum of the losses of batch 0 with the weights of the folder
                   norm/NAME  float64 (): Frobenius norm of the gradient of that sum by weight NAME
                   rows/NAME, columns/NAME  float32: gradient @ sketch(columns) and sketch(rows) @ gradient, where sketch(n) = cos(0 .. n - 1);
                   for a norm or a bias rows/NAME is the gradient itself
    FAMILY_balanced.npz  the same of routers and embeddings, where to the sum of losses the load-balancing loss of all of
                   batch 0 is added, times its coefficient and the number of targets
                   balance    float64 (): that loss
                   coefficient float64 ()
    FAMILY_bf16.npz  loss and gradients with products in bfloat16 (autocast: weights, sums and norms are float32), of a
                   batch of its own (token_ids, targets, starts), in which no token's choice of experts is near another
    optimizer.json AdamW's numbers; no decay of norms and biases
Every sequence goes through the model alone, so that packing is not part of the reference. In float32 PyTorch's own gradients are up to
1.4e-5 (relative) from these, which would be all that a test allows; angles of rotations alone are float32, as the models define them.
"""

import argparse
import importlib
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

FAMILIES = ["llama2", "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi4", "olmo2", "olmo3", "granite", "smollm3", "glm4", "deepseek_dense", "exaone4",
            "hunyuan_v1_dense", "ministral3", "arcee"]
# Their gradients get our names by our reader of folders, which is linear but for the 1 that it adds to norms.
STATES = ["qwen35", "olmo_hybrid", "lfm2", "bamba", "nemotron_h", "falcon_h1"]
EXPERTS = ["mixtral", "qwen3moe", "deepseek_v3", "gptoss", "hunyuan_v1_moe", "afmoe", "laguna"]
FAMILIES += EXPERTS + STATES
BALANCED = {"mixtral": 0.02, "qwen3moe": 0.3}  # coefficient of the load-balancing loss
# Routers' logits are 0.08 from those of float32 at most where products are in bfloat16.
CLEAR, CLEAR_LENGTHS = 0.25, [9, 1, 12, 5, 10, 8, 11, 8]
FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
RENAMED = {
    "shared_experts": "shared_expert", "mlp.router.": "mlp.gate.", "mlp.gate.wg.": "mlp.gate.", "mlp.gate.gate.": "mlp.gate.", "shared_mlp.": "shared_expert.",
    "query_layernorm": "q_norm", "key_layernorm": "k_norm", "self_attn.g_proj": "self_attn.gate_proj",
    "pre_mlp_layernorm": "pre_feedforward_layernorm", "post_mlp_layernorm": "post_feedforward_layernorm",
}  # fmt: skip
GOLDEN = Path(__file__).parent
OUT = GOLDEN / "training"
# At this rate rounding stays rounding: float32 and float64 losses differ by less than 2e-6 over the 20 steps. At 0.002
# it grows, and PyTorch's own float32 losses of llama3 are 3.6e-5 from those of float64.
OPTIMIZER = {"lr": 0.0005, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
# some longer than a window, some of one token
LENGTHS = [[29, 1, 14, 7, 3, 10], [5, 26, 2, 11, 19, 1], [13, 9, 21, 6, 4, 11], [1, 2, 40, 3, 8, 10]]
STEPS, SMALLEST_VOCAB = 20, 200


def make_batches() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    starts = np.array([np.cumsum([0, *lengths]) for lengths in LENGTHS], np.int32)
    ids = rng.integers(3, SMALLEST_VOCAB, (len(LENGTHS), starts[0, -1])).astype(np.int32)
    targets = np.roll(ids, -1, axis=1)
    for batch, bounds in enumerate(starts):
        targets[batch, bounds[1:] - 1] = -1  # a sequence's last token has nothing to say
        targets[batch, bounds[3] : bounds[3] + 3] = -1  # as of a user's turn
    return {"token_ids": ids, "targets": targets, "starts": starts}


@contextmanager
def computing_in(dtype: torch.dtype):
    """What transformers does in float32 whatever the model's type (norms, softmax) is done in `dtype`."""
    floats = mock.patch.object(torch, "float32", dtype), mock.patch.object(torch, "float", dtype)
    with floats[0], floats[1], mock.patch.object(torch.Tensor, "float", lambda x: x.to(dtype)):
        yield


def in_float64(family: str):
    eager = {"attn_implementation": "eager"} | ({"experts_implementation": "eager"} if family in EXPERTS else {})
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / family, dtype=torch.float32, **eager).eval().double()
    rotation, float32 = getattr(model.model, "rotary_emb", None), torch.float32
    if rotation is None:
        return model
    forward = rotation.forward

    def rotate(*args, **kwargs):
        with computing_in(float32):
            return forward(*args, **kwargs)

    rotation.forward = rotate
    return model


def loss_sum(model, batches, index: int, routed: list | None = None) -> torch.Tensor:
    """The sum of losses; `routed` gets the router's logits of every layer, sequence by sequence."""
    total = 0.0
    for begin, end in zip(batches["starts"][index, :-1], batches["starts"][index, 1:]):
        ids, targets = (torch.from_numpy(batches[name][index, begin:end]).long() for name in ("token_ids", "targets"))
        within = lambda x: (x - 3) % (model.config.vocab_size - 3) + 3  # a vocabulary may be smaller than the batches'
        ids, targets = within(ids), torch.where(targets < 0, targets, within(targets))
        with computing_in(torch.float64):
            out = model(ids[None], use_cache=False, **({} if routed is None else {"output_router_logits": True}))
        logits = out.logits[0]
        if routed is not None and (targets >= 0).any():  # sequences without a target are no part of a batch
            routed.append(out.router_logits)
        total = total + torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="sum")
    return total


def split(name: str, gradient: np.ndarray, config) -> dict[str, np.ndarray]:
    """A tensor that stacks several matrices as these, by their own names."""
    for stored, weight in RENAMED.items():
        name = name.replace(stored, weight)
    if config.model_type == "gpt_oss" and ".experts." in name:  # inputs are rows, gate and up stand by turns
        stem, kind = name.removesuffix("_bias"), "bias" if name.endswith("_bias") else "weight"
        parts = ("gate_up_proj", ("gate_proj", "up_proj")) if "gate_up" in name else ("down_proj", ("down_proj",))
        found = {}
        for at, part in enumerate(parts[1]):
            own = gradient[..., at :: len(parts[1])]
            own = own.ravel() if kind == "bias" else _flat(own.swapaxes(1, 2))
            found[f"{stem.replace(parts[0], part)}.{kind}"] = own
        return found
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(gradient, 2, axis=1)
        stem = name.removesuffix("gate_up_proj")
        return {f"{stem}gate_proj.weight": _flat(gate), f"{stem}up_proj.weight": _flat(up)}
    if gradient.ndim == 3:
        return {f"{name}.weight": _flat(gradient)}
    for fused, parts in FUSED.items():
        if fused in name:
            rows = [config.intermediate_size] * 2
            if len(parts) == 3:
                head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
                rows = [head * config.num_attention_heads, *[head * config.num_key_value_heads] * 2]
            stem = name.replace(fused.rpartition(".")[2], "{}")
            pieces = np.split(gradient, np.cumsum(rows)[:-1])
            return {stem.format(part): piece for part, piece in zip(parts, pieces)}
    if name.endswith("kv_b_proj.weight"):  # of each head the rows of its keys, transposed, and those of its values
        heads = gradient.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        keys, values = np.split(heads, [config.qk_nope_head_dim], axis=1)
        parts = {"k_b_proj": keys.swapaxes(1, 2), "v_b_proj": values}
        return {name.replace("kv_b_proj", part): g.reshape(-1, g.shape[2]) for part, g in parts.items()}
    return {name: gradient}


def _flat(stack: np.ndarray) -> np.ndarray:
    """(matrices, rows, columns) as the rows of all matrices."""
    return stack.reshape(-1, stack.shape[2])


def read_again(family: str, stored: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of a folder by our names, in our shapes."""
    from safetensors.numpy import save_file

    from ckdist.weights.checkpoint import open_checkpoint
    from ckdist.weights.dequantize import read_tensor

    found = []
    for scale in (1, 0):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(GOLDEN / family / "config.json", folder)
            scaled = {n: np.ascontiguousarray(g * scale, np.float32) for n, g in stored.items()}
            save_file(scaled, f"{folder}/model.safetensors")
            tensors = open_checkpoint(folder).tensors.values()
            found.append({source.name: np.asarray(read_tensor(source), np.float64) for source in tensors})
    return {name: value - found[1][name] for name, value in found[0].items()}


def gradients(model, family: str = "") -> dict[str, np.ndarray]:
    """What the last backward left, as norms and sketches."""
    golden = {}
    parameters = dict(model.named_parameters())  # tied ones stand there once
    # biases that only choose experts have none
    stored = {name: parameter.grad.numpy() for name, parameter in parameters.items() if parameter.grad is not None}
    parts = read_again(family, stored).items() if family in STATES else (
        part for name, g in stored.items() for part in split(name, g, model.config).items())
    for name, gradient in parts:
        golden[f"norm/{name}"] = np.linalg.norm(gradient)
        if gradient.ndim == 1:
            golden[f"rows/{name}"] = gradient.astype(np.float32)
        else:
            golden[f"rows/{name}"] = (gradient @ np.cos(np.arange(gradient.shape[1]))).astype(np.float32)
            golden[f"columns/{name}"] = (np.cos(np.arange(gradient.shape[0])) @ gradient).astype(np.float32)
    return golden


def write_balanced(family: str, batches) -> None:
    module = importlib.import_module(in_float64(family).__module__)
    model, routed, coefficient = in_float64(family), [], BALANCED[family]
    loss = loss_sum(model, batches, 0, routed)
    layers = tuple(torch.cat(parts) for parts in zip(*routed))
    with computing_in(torch.float64):
        experts = layers[0].shape[1]
        balance = module.load_balancing_loss_func(layers, experts, model.config.num_experts_per_tok)
    (loss + coefficient * int((batches["targets"][0] >= 0).sum()) * balance).backward()
    kept = lambda name: ".mlp.gate." in name or "embed_tokens" in name
    golden = {name: gradient for name, gradient in gradients(model).items() if kept(name)}
    golden |= {"loss": loss.item(), "balance": balance.item(), "coefficient": coefficient}
    np.savez_compressed(OUT / f"{family}_balanced.npz", **golden)


def clear_batch(model) -> dict[str, np.ndarray]:
    """Sequences in which every layer's last chosen expert is clearly before the first one that is not chosen."""
    rng, found, used = np.random.default_rng(9), [], model.config.num_experts_per_tok
    for length in CLEAR_LENGTHS:
        ids = []
        while len(ids) < length:  # what follows a token changes nothing for it
            tried = torch.tensor([[*ids, rng.integers(3, SMALLEST_VOCAB)]])
            with torch.no_grad():
                layers = model(tried, use_cache=False, output_router_logits=True).router_logits
            best = torch.stack([logits[-1] for logits in layers]).sort(dim=-1, descending=True).values
            if (best[:, used - 1] - best[:, used]).min() > CLEAR:
                ids = tried[0].tolist()
        found.append(np.array(ids, np.int32))
    ids, starts = np.concatenate(found), np.cumsum([0, *CLEAR_LENGTHS]).astype(np.int32)
    targets = np.roll(ids, -1)
    targets[starts[1:] - 1] = -1
    return {"token_ids": ids, "targets": targets, "starts": starts}


def write_bfloat16(family: str) -> None:
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(GOLDEN / family, dtype=torch.float32, **eager).eval()
    batch, total = clear_batch(model), 0.0
    for begin, end in zip(batch["starts"][:-1], batch["starts"][1:]):
        ids, targets = (torch.from_numpy(batch[name][begin:end]).long() for name in ("token_ids", "targets"))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[None], use_cache=False).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits.float(), targets, ignore_index=-1, reduction="sum")
    total.backward()
    np.savez_compressed(OUT / f"{family}_bf16.npz", loss=total.item(), **batch, **gradients(model))


def write_family(family: str, batches) -> None:
    model = in_float64(family)
    loss = loss_sum(model, batches, 0)
    loss.backward()
    golden = {"loss": loss.item(), **gradients(model, family)}
    parameters = dict(model.named_parameters())
    decayed = [p for name, p in parameters.items() if p.ndim > 1 and not name.endswith("bias")]
    others = [p for name, p in parameters.items() if p.ndim == 1 or name.endswith("bias")]
    decay = OPTIMIZER["weight_decay"]
    groups = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=OPTIMIZER["lr"], betas=tuple(OPTIMIZER["betas"]), eps=OPTIMIZER["eps"], foreach=False)
    losses = []
    for step in range(STEPS):
        index = step % len(LENGTHS)
        optimizer.zero_grad()
        mean = loss_sum(model, batches, index) / int((batches["targets"][index] >= 0).sum())
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    np.savez_compressed(OUT / f"{family}.npz", losses=np.array(losses), **golden)
    print(family, f"{losses[0]:.4f} -> {losses[-1]:.4f}", f"{(OUT / f'{family}.npz').stat().st_size} bytes", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=FAMILIES, help=f"which of {', '.join(FAMILIES)}; all by default")
    torch.set_num_threads(1)
    OUT.mkdir(exist_ok=True)
    batches = make_batches()
    np.savez_compressed(OUT / "batches.npz", **batches)
    versions = {"torch": torch.__version__.split("+")[0], "steps": STEPS, "optimizer": "AdamW"}
    (OUT / "optimizer.json").write_text(json.dumps(OPTIMIZER | versions, indent=2) + "\n")
    for family in parser.parse_args().families:
        write_family(family, batches)
        if family in BALANCED:
            write_balanced(family, batches)
            write_bfloat16(family)


if __name__ == "__main__":
    main()
