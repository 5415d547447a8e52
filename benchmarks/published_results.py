"""Results that others published for models on CPUs, beside what `ckdist plan` predicts for the same machine and model.

    python benchmarks/published_results.py

Inputs are those of the sources; what these do not say is the catalogue's assumption. No figure was fitted to a result.
The engines are others' (llama.cpp, ik_llama.cpp, SGLang, distributed-llama, ollama), so a prediction here is of the
machine more than of the engine. The list of LATER was complete before anything was predicted of it: results without a
GPU whose CPU, memory, type and context are told, or follow from the instance; of several engines or thread counts the
fastest.
"""

import dataclasses
from dataclasses import dataclass

from ckdist.plan.cluster import Cluster
from ckdist.plan.machine_spec import MachineSpec, machine_named
from ckdist.plan.predict import Predictor, Question, Way
from ckdist.weights.described import describe, describe_config, shape_path

LLAMA_8B = describe(shape_path("llama-3.1-8b")).metadata
LLAMA_3B = {
    **LLAMA_8B, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
    "head_dim": 128, "tie_word_embeddings": True,
}  # fmt: skip
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
    "num_experts_per_tok": 2, "max_position_embeddings": 32768,
}  # fmt: skip
LLAMA2_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 4096,
}  # fmt: skip
QWEN_14B = {
    "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 5120, "intermediate_size": 17408,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN_72B = {
    "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
    "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8, "max_position_embeddings": 32768,
}  # fmt: skip
PHI_4 = {
    "model_type": "phi3", "vocab_size": 100352, "hidden_size": 5120, "intermediate_size": 17920,
    "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10, "max_position_embeddings": 16384,
}  # fmt: skip
CONFIGS = {
    "llama-3-8b": LLAMA_8B, "llama-3.2-3b": LLAMA_3B, "mixtral-8x7b": MIXTRAL, "llama-2-7b": LLAMA2_7B,
    "qwen3-14b": QWEN_14B, "qwen2.5-72b": QWEN_72B, "phi-4": PHI_4,
}  # fmt: skip
GIGABIT = {"link_rate": 0.125e9, "link_seconds": 6e-5}


def memory(channels: int, transfers: float) -> float:
    """Bytes per second that weights are read with: 0.8 of the peak."""
    return 0.8 * channels * transfers * 8


def rates(f32: float, bf16: float, int8: float) -> dict[str, tuple[float, float]]:
    """Of the peaks of a core, as in the catalogue."""
    return {"F32": (f32 / 11.4, 0.7 * f32), "BF16": (bf16 / 11.4, 0.7 * bf16), "Q8_0": (int8 / 11.4, 0.7 * int8)}


def machines() -> dict[str, MachineSpec]:
    """Of the catalogue, and others by their data sheets."""
    epyc, xeon, desktop = (machine_named(name) for name in ("epyc-9175f", "xeon-6980p", "desktop"))
    graviton, old = machine_named("graviton4"), machine_named("xeon-8280")
    zen4 = {"rates": desktop.rates, "attention": desktop.attention}  # a core's, at a desktop's clock
    pi = MachineSpec(
        name="Raspberry Pi 5", isa="neon_dotprod", cores=4, memory=8e9, bandwidth=0.8 * 17.1e9, attention=27e9,
        barrier=((4, 6e-7),), rates=rates(38e9, 38e9, 154e9), **GIGABIT,
    )  # fmt: skip
    return {
        "EPYC 9175F": epyc,
        "EPYC 9135, DDR5-5600": dataclasses.replace(epyc, bandwidth=memory(12, 5600e6)),
        "2 x Xeon 6980P": xeon,
        "Xeon 6980P": dataclasses.replace(xeon, nodes=3),
        "Ryzen 7950X, DDR5-3600": dataclasses.replace(desktop, bandwidth=memory(2, 3600e6)),
        "Ryzen 5900X, DDR4-3600": dataclasses.replace(
            desktop, isa="avx2", cores=12, bandwidth=memory(2, 3600e6), rates=rates(134e9, 134e9, 200e9)
        ),
        "Raspberry Pi 5": pi,
        "Graviton 4": graviton,
        "Graviton 3": dataclasses.replace(graviton, cores=64, bandwidth=memory(8, 4800e6)),
        "2 x EPYC 9175F, 8 x DDR5-6400 each": dataclasses.replace(epyc, nodes=2, bandwidth=memory(8, 6400e6)),
        "EPYC 9374F": dataclasses.replace(epyc, **zen4, cores=32, bandwidth=memory(12, 4800e6)),
        "EPYC 9554": dataclasses.replace(epyc, **zen4, cores=64, bandwidth=memory(12, 4800e6)),
        "Threadripper PRO 7965WX": dataclasses.replace(epyc, **zen4, cores=24, bandwidth=memory(8, 4800e6)),
        "2 x Xeon Gold 6138": dataclasses.replace(
            old, isa="avx512", cores=20, bandwidth=memory(6, 2666e6), rates=rates(122e9, 122e9, 243e9)
        ),
        "Ryzen 7950X, 64 GB/s": dataclasses.replace(desktop, bandwidth=0.8 * 64e9),
    }


@dataclass(frozen=True)
class Published:
    """`decode` and `prefill` (0: not told) in tokens per second; `context`: tokens before those that were decoded;
    `threads`: of a NUMA node, 0: all.
    """

    engine: str
    source: str
    machine: str
    model: str
    kind: str
    context: int
    decode: float
    hosts: int = 1
    threads: int = 0
    prefill: float = 0.0
    prompt: int = 512


PUBLISHED = (
    Published("llama.cpp, 16 threads", "Kimi-K2.5 on EPYC", "EPYC 9175F", "kimi-k2", "Q4_K", 4096, 12.94, 1, 16, 24.43),
    Published("llama.cpp, 13 threads", "Kimi-K2.5 on EPYC", "EPYC 9175F", "kimi-k2", "Q4_K", 4096, 11.67, 1, 13, 21.58),
    Published("llama.cpp, 12 threads", "Kimi-K2.5 on EPYC", "EPYC 9175F", "kimi-k2", "Q4_K", 4096, 11.86, 1, 12, 14.58),
    Published(
        "SGLang", "lmsys.org, 2025-07-14", "2 x Xeon 6980P", "deepseek-r1", "Q8_0", 1024, 14.71, 1, 0, 543.0, 1024
    ),
    Published("ik_llama.cpp", "level1techs.com, R1 at home", "Xeon 6980P", "deepseek-r1", "Q8_0", 512, 7.5),
    Published("llama.cpp", "level1techs.com, R1 at home", "Xeon 6980P", "deepseek-r1", "Q8_0", 512, 6.2),
    Published("llama.cpp", "xlab.tencent.com, 2025-03-16", "EPYC 9135, DDR5-5600", "deepseek-r1", "Q8_0", 128, 7.17),
    Published(
        "distributed-llama", "distributed-llama, pull request 64", "Raspberry Pi 5", "llama-3-8b", "Q4_0", 90, 3.07, 2
    ),
    Published(
        "distributed-llama", "distributed-llama, pull request 64", "Raspberry Pi 5", "llama-3-8b", "Q4_0", 90, 4.08, 4
    ),
    Published("ollama", "geerlingguy/sbc-reviews, 21", "Raspberry Pi 5", "llama-3-8b", "Q4_K", 256, 2.17),
    Published("ollama", "geerlingguy/sbc-reviews, 21", "Raspberry Pi 5", "llama-3.2-3b", "Q4_K", 256, 4.88),
    Published("llama.cpp", "llama.cpp, issue 4716", "Ryzen 7950X, DDR5-3600", "mixtral-8x7b", "Q8_0", 256, 3.37),
    Published("llama.cpp", "llama.cpp, issue 4716", "Ryzen 5900X, DDR4-3600", "mixtral-8x7b", "Q8_0", 256, 3.58),
)
LATER = (
    Published("llama.cpp", "arm-learning-paths, llama-cpu", "Graviton 4", "llama-3-8b", "Q4_0", 270, 61.62, 1, 64),
    Published("llama.cpp", "arm-learning-paths, deepseek-cpu", "Graviton 4", "deepseek-r1", "Q4_0", 275, 12.24, 1, 64),
    Published("llama.cpp", "llama.cpp, pull request 5780", "Graviton 3", "llama-2-7b", "Q4_0", 80, 31.55),
    Published(
        "llama.cpp", "llama.cpp, issue 11744", "2 x EPYC 9175F, 8 x DDR5-6400 each", "llama-3.1-70b", "F16", 64, 4.31
    ),
    Published(
        "ik_llama.cpp", "ik_llama.cpp, pull request 259", "Xeon 6980P", "deepseek-r1", "Q4_K", 64, 10.02, 1, 21, 93.08
    ),
    Published(
        "ik_llama.cpp",
        "ik_llama.cpp, 534",
        "Threadripper PRO 7965WX",
        "qwen2.5-72b",
        "Q4_0",
        256,
        4.74,
        1,
        24,
        45.6,
        2048,
    ),
    Published(
        "ik_llama.cpp", "ik_llama.cpp, 602", "Threadripper PRO 7965WX", "qwen3-14b", "Q4_0", 64, 22.57, 1, 24, 225.5
    ),
    Published("ik_llama.cpp", "ik_llama.cpp, 180", "EPYC 9374F", "deepseek-r1", "Q4_K", 64, 10.01, 1, 32, 49.47),
    Published(
        "ik_llama.cpp", "ik_llama.cpp, 385", "2 x Xeon Gold 6138", "qwen3-235b-a22b", "Q8_0", 64, 2.41, 1, 10, 7.62
    ),
    Published(
        "ik_llama.cpp", "ik_llama.cpp, 385", "2 x Xeon Gold 6138", "qwen3-30b-a3b", "Q8_0", 64, 12.9, 1, 10, 60.1
    ),
    Published(
        "ik_llama.cpp", "ik_llama.cpp, 357", "Ryzen 7950X, 64 GB/s", "qwen3-30b-a3b", "IQ4_XS", 64, 26.35, 1, 16, 474.3
    ),
    Published("llama.cpp", "ahelpme.com, Phi-4", "EPYC 9554", "phi-4", "Q4_K", 64, 28.74),
    Published("llama.cpp", "ahelpme.com, Phi-4", "EPYC 9554", "phi-4", "Q6_K", 64, 23.25),
    Published("llama.cpp", "ahelpme.com, Phi-4", "EPYC 9554", "phi-4", "Q8_0", 64, 19.19),
)


def predictor(one: Published) -> Predictor:
    """Of the model on the machine of a result, by tensors."""
    if one.model in CONFIGS:
        checkpoint = describe_config(CONFIGS[one.model], one.model, one.kind)
    else:
        checkpoint = describe(shape_path(one.model), one.kind)
    cluster = Cluster(machines()[one.machine], one.hosts, one.threads)
    return Predictor(Question(checkpoint, cluster, one.context), Way("tensor"))


def rows():
    """Each result with the predicted tokens per second of decode, and of prefill."""
    for one in (*PUBLISHED, *LATER):
        p = predictor(one)
        yield one, p.decode(1, one.context), p.prefill(one.prompt) if one.prefill else None


def main():
    print("| machine | model | engine, source | decode | predicted | error | bound | prefill | predicted |")
    print("|---|---|---|---|---|---|---|---|---|")
    for one, decode, prefill in rows():
        hosts = f"{one.hosts} x " if one.hosts > 1 else ""
        more = f"{one.prefill:.0f} | {prefill.tokens:.0f}" if prefill else " | "
        print(
            f"| {hosts}{one.machine} | {one.model} {one.kind} | {one.engine}; {one.source} | {one.decode:.4g} | "
            f"{decode.tokens:.3g} | {decode.tokens / one.decode - 1:+.0%} | {decode.bound} | {more} |"
        )


if __name__ == "__main__":
    main()
