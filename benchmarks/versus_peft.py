"""LoRA of a model on short chats, beside PEFT on torch.compile: tokens/s by turns in one run, their ratio, memory.

    python benchmarks/versus_peft.py FOLDER [--gguf FILE] [--threads 2] [--rounds 5] [--minutes 8]
        [--dtype bfloat16|float32] [--batch 8] [--lengths 24-160] [--checkpointing] [--compile layers|model|none]
        --pytorch-python PATH

FOLDER has the base as safetensors. With --gguf it is first made of that file by transformers. Both sides train the
same sequences with rank 16 on all linears and AdamW. ckdist packs a batch; PEFT pads it to its longest sequence, to a
multiple of 32, as a collator does, so that torch.compile sees few shapes. It compiles one decoder layer, which all
layers share: compiling all layers as one graph takes many minutes on two cores. No round begins after --minutes.
Tokens are those of the sequences, without padding. A side is one process, which computes while the other one waits.
Printed are the medians of rounds, the ratio, the ratio of CPU seconds (for a busy machine) and the largest resident
set.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

RANK, RATE, WARM_UP, STEPS = 16, 2e-4, 1, 2
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def batches(options) -> list[list[list[int]]]:
    """The same sequences on both sides: STEPS batches of token ids."""
    import numpy as np

    low, high = map(int, options.lengths.split("-"))
    rng = np.random.default_rng(0)
    sizes = rng.integers(low, high + 1, (STEPS, options.batch))
    return [[rng.integers(10, 4000, size).tolist() for size in step] for step in sizes]


def ckdist_step(options):
    """step(sequences) -> loss."""
    import numpy as np

    from ckdist.mesh import Mesh
    from ckdist.program.pool import ThreadPool
    from ckdist.train.batch import PackedBatch
    from ckdist.train.config import TrainConfig
    from ckdist.train.model import open_model
    from ckdist.train.optimizer import Optimizer
    from ckdist.train.ranks import TrainingRanks
    from ckdist.train.trainer import native_executable

    high = int(options.lengths.split("-")[1])
    config = TrainConfig(
        output_dir=tempfile.mkdtemp(), train_file=("none",), model_name_or_path=options.folder, lora_r=RANK,
        lora_alpha=2.0 * RANK, lora_target_modules=TARGETS, max_length=high, per_device_train_batch_size=options.batch,
        bf16=options.dtype == "bfloat16", activation_checkpointing=options.checkpointing,
    )  # fmt: skip
    model, ranks, pool = open_model(config), TrainingRanks(Mesh.of_job(1, 0)), ThreadPool(options.threads)
    executable = native_executable(model, config, model.lowered(config, ranks.mesh, 1), ranks, pool)
    optimizer = Optimizer(config, executable.parameters, executable.gradients, ranks, pool)

    def step(sequences) -> float:
        ids = np.concatenate(sequences).astype(np.int32)
        starts = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
        targets = np.append(ids[1:], -1).astype(np.int32)
        targets[starts[1:] - 1] = -1
        executable.zero_grad()
        loss, count = executable.forward_backward(PackedBatch(ids, targets, starts)), int((targets >= 0).sum())
        optimizer.step(RATE, count)
        return loss / count

    return step


def peft_step(options):
    """step(sequences) -> loss."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(options.threads)
    base = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    if options.checkpointing:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, fused=True)
    run = torch.compile(model) if options.compile == "model" else model
    if options.compile == "layers":
        for layer in base.model.layers:
            layer.compile()

    def step(sequences) -> float:
        width = -(-max(map(len, sequences)) // 32) * 32
        ids = torch.zeros(len(sequences), width, dtype=torch.long)
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, own in enumerate(sequences):
            ids[row, : len(own)] = labels[row, : len(own)] = torch.tensor(own)
            mask[row, : len(own)] = 1
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = run(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    return step


def work(side: str, options) -> None:
    """Computes a round for each line of standard input."""
    step, data = {"ckdist": ckdist_step, "peft": peft_step}[side](options), batches(options)
    for _ in sys.stdin:
        began, cpu = time.perf_counter(), time.process_time()
        losses = [step(sequences) for sequences in data]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"seconds": seconds, "cpu": cpu, "losses": losses, "mib": peak}), flush=True)


def convert(folder: str, file: str) -> None:
    """Writes the folder from a GGUF file."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = pathlib.Path(file).resolve()
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name)
    model.hf_quantizer, model.is_quantized = None, False  # its weights are floats now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--gguf")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--compile", choices=("layers", "model", "none"), default="layers")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lengths", default="24-160")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--pytorch-python", default=sys.executable)
    parser.add_argument("--work", choices=("ckdist", "peft", "convert"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        convert(options.folder, options.gguf) if options.work == "convert" else work(options.work, options)
        return
    command = lambda python, job: [python, __file__, *sys.argv[1:], "--work", job]
    if options.gguf and not pathlib.Path(options.folder, "config.json").exists():
        subprocess.run(command(options.pytorch_python, "convert"), check=True)
    pythons, pipes = (
        {"ckdist": sys.executable, "peft": options.pytorch_python},
        {"stdin": -1, "stdout": -1, "text": True},
    )
    environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
    sides = {side: subprocess.Popen(command(python, side), env=environment, **pipes)
             for side, python in pythons.items()}  # fmt: skip
    tokens, found = sum(len(own) for step in batches(options) for own in step), {side: [] for side in sides}
    deadline = time.monotonic() + 60 * options.minutes
    for number in range(WARM_UP + options.rounds):
        if time.monotonic() > deadline and found["peft"]:
            break
        for side, process in sides.items():
            print("round", file=process.stdin, flush=True)
            result = json.loads(process.stdout.readline())
            if number >= WARM_UP:
                found[side].append(result)
            print(
                f"{number} {side}: {tokens / result['seconds']:.0f} tokens/s, loss {result['losses'][-1]:.4f}",
                flush=True,
            )
    for side, process in sides.items():
        process.stdin.close()
        process.wait()
        median = statistics.median(tokens / result["seconds"] for result in found[side])
        print(f"{side}: {median:.0f} tokens/s, {found[side][-1]['mib']:.0f} MiB")
    for name in ("seconds", "cpu"):
        pairs = zip(found["ckdist"], found["peft"], strict=True)
        print(f"ratio by {name}: {statistics.median(peft[name] / own[name] for own, peft in pairs):.2f}")


if __name__ == "__main__":
    main()
