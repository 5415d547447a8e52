"""Makes adapters on experts, and what models of make_golden.py make with them: by PEFT and transformers in float32.

    pip install ckdist[golden] peft && python tests/golden/make_lora_golden.py

Each folder tests/golden/lora/FAMILY holds
    adapter_config.json, adapter_model.safetensors   matrices on attention and experts, none of them zero
    logits.npy    float32 (24, vocab), of the first ids of tests/golden/FAMILY/ids.npy
gptoss     written by PEFT, of `target_parameters`: gate and up by turns, matrices with inputs as rows
mixtral    written by PEFT from per-expert linears (w1, w2, w3), which it fuses: gate and up one after the other
qwen3moe   per-expert linears, as PEFT writes them where experts are modules; PEFT reads and fuses them
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

GOLDEN = Path(__file__).parent
OUT = GOLDEN / "lora"
TOKENS, RANK, ALPHA = 24, 2, 5.0
ATTENTION = ["q_proj", "o_proj"]


def base(name: str):
    exact = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32, **exact).eval()


def write_logits(name: str, model) -> None:
    ids = torch.from_numpy(np.load(GOLDEN / name / "ids.npy")[:TOKENS]).long()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].numpy()
        with model.disable_adapter():
            plain = model(ids[None], use_cache=False).logits[0].numpy()
    np.save(OUT / name / "logits.npy", logits)
    print(name, "adapted and plain logits are", float(np.abs(logits - plain).max()), "apart")


def fill(model) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape)


def write_parameters(name: str) -> None:
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=ATTENTION, target_parameters=parameters, task_type="CAUSAL_LM"
    )
    model = get_peft_model(base(name), config).eval()
    fill(model)
    model.save_pretrained(OUT / name)
    write_logits(name, model)


def per_expert(
    name: str, prefix: str, parts: dict[str, tuple[int, int]], experts: int, layers: tuple[int, ...], folder: Path
) -> None:
    """An adapter on linears; `parts`: columns and rows of each."""
    rng, tensors = torch.Generator().manual_seed(0), {}
    shapes = {f"{prefix}.{e}.{part}": shape for e in range(experts) for part, shape in parts.items()}
    for layer in layers:
        for module, (columns, rows) in shapes.items():
            stem = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{stem}.lora_A.weight"] = 0.3 * torch.randn((RANK, columns), generator=rng)
            tensors[f"{stem}.lora_B.weight"] = 0.3 * torch.randn((rows, RANK), generator=rng)
    folder.mkdir(exist_ok=True, parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none",
              "target_modules": list(parts), "base_model_name_or_path": name}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    shutil.rmtree(OUT, ignore_errors=True)
    write_parameters("gptoss")
    parts = {"gate_proj": (64, 36), "up_proj": (64, 36), "down_proj": (36, 64)}
    per_expert("qwen3moe", "mlp.experts", parts, 9, (0, 2), OUT / "qwen3moe")
    write_logits("qwen3moe", PeftModel.from_pretrained(base("qwen3moe"), OUT / "qwen3moe").eval())
    with tempfile.TemporaryDirectory() as folder:
        parts = {"w1": (64, 76), "w3": (64, 76), "w2": (76, 64)}
        per_expert("mixtral", "block_sparse_moe.experts", parts, 4, (0, 1), Path(folder))
        model = PeftModel.from_pretrained(base("mixtral"), folder).eval()
        model.save_pretrained(OUT / "mixtral")
        write_logits("mixtral", model)
    for readme in OUT.glob("*/README.md"):
        readme.unlink()


if __name__ == "__main__":
    main()
