"""Makes adapters, and the logits of make_golden.py's models with them: by PEFT and transformers in float32.

    pip install ckdist[golden] peft && python tests/golden/make_lora_golden.py [FOLDER ...]

Each folder tests/golden/lora/FAMILY[-WORD] holds
    adapter_config.json, adapter_model.safetensors   none of the matrices is zero
    logits.npy    float32 (24, vocab), of the first ids of tests/golden/FAMILY/ids.npy
FAMILY-patterns    written by PEFT: rank_pattern, alpha_pattern and rsLoRA, and modules that are left out; of phi3 on
           fused linears, of qwen2moe on stacked experts, of qwen35 on queries whose rows stand beside gates
gptoss     written by PEFT, of `target_parameters`: gate and up by turns, matrices with inputs as rows
mixtral    written by PEFT from per-expert linears (w1, w2, w3), which it fuses: gate and up one after the other
qwen3moe   per-expert linears, as PEFT writes them where experts are modules; PEFT reads and fuses them
"""

import json
import shutil
import sys
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


def write_logits(name: str, model, folder: str = "") -> None:
    ids = torch.from_numpy(np.load(GOLDEN / name / "ids.npy")[:TOKENS]).long()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].numpy()
        with model.disable_adapter():
            plain = model(ids[None], use_cache=False).logits[0].numpy()
    np.save(OUT / (folder or name) / "logits.npy", logits)
    print(folder or name, "adapted and plain logits are", float(np.abs(logits - plain).max()), "apart")


def fill(model) -> None:
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape)


def write(name: str, folder: str, **fields) -> None:
    model = get_peft_model(base(name), LoraConfig(r=RANK, lora_alpha=ALPHA, task_type="CAUSAL_LM", **fields)).eval()
    fill(model)
    model.peft_config["default"].base_model_name_or_path = name
    model.save_pretrained(OUT / folder)
    # read again: save_pretrained sorts patterns, of which the first that matches counts
    write_logits(name, PeftModel.from_pretrained(base(name), OUT / folder).eval(), folder)


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


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PATTERNS = {
    "llama3": {
        "target_modules": [*ATTENTION, "v_proj", "gate_proj", "up_proj", "down_proj"],
        "exclude_modules": ["model.layers.1.self_attn.o_proj"],
        "rank_pattern": {r"layers\.1\.self_attn\.q_proj": 5, "down_proj": 3, "proj": 7},
        "alpha_pattern": {"v_proj": 1.5, r"^model\.layers\.0\..*": 9, "gate_proj": -2},
    },
    "phi3": {
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "layers_to_transform": [1],
        "rank_pattern": {"qkv_proj": 5, "down_proj": 1},
        "alpha_pattern": {"gate_up_proj": 9, "self_attn.qkv_proj": 0.5},
    },
    "qwen2moe": {
        "target_modules": ATTENTION,
        "target_parameters": EXPERTS,
        "rank_pattern": {"experts.gate_up_proj": 3, "q_proj": 1},
        "alpha_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 9, r"model.*gate_up_proj": 2, "o_proj": 3},
    },
    "qwen35": {
        "target_modules": ["q_proj", "k_proj", "down_proj"],
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"k_proj": 9},
    },
}


def per_expert_linears() -> None:
    parts = {"gate_proj": (64, 36), "up_proj": (64, 36), "down_proj": (36, 64)}
    per_expert("qwen3moe", "mlp.experts", parts, 9, (0, 2), OUT / "qwen3moe")
    write_logits("qwen3moe", PeftModel.from_pretrained(base("qwen3moe"), OUT / "qwen3moe").eval())


def fused_linears() -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = {"w1": (64, 76), "w3": (64, 76), "w2": (76, 64)}
        per_expert("mixtral", "block_sparse_moe.experts", parts, 4, (0, 1), Path(folder))
        model = PeftModel.from_pretrained(base("mixtral"), folder).eval()
        model.save_pretrained(OUT / "mixtral")
        write_logits("mixtral", model)


def main() -> None:
    torch.set_num_threads(1)
    makers = {
        "gptoss": lambda: write("gptoss", "gptoss", target_modules=ATTENTION, target_parameters=EXPERTS),
        "qwen3moe": per_expert_linears,
        "mixtral": fused_linears,
    }
    for name, fields in PATTERNS.items():
        makers[f"{name}-patterns"] = lambda name=name, fields=fields: write(
            name, f"{name}-patterns", use_rslora=True, **fields
        )
    for folder in sys.argv[1:] or makers:
        shutil.rmtree(OUT / folder, ignore_errors=True)
        makers[folder]()
    for readme in OUT.glob("*/README.md"):
        readme.unlink()


if __name__ == "__main__":
    main()
