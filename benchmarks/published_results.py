"""Results that others published for models on CPUs, beside what `ckdist plan` predicts for the same machine and model.

    python benchmarks/published_results.py

Inputs are those of the sources; what these do not say is the catalogue's assumption. No figure was fitted to a result.
The engines are others' (llama.cpp, ik_llama.cpp, SGLang, distributed-llama, ollama), so a prediction here is of the
machine more than of the engine.
"""

import dataclasses
from dataclasses import dataclass

from ckdist.planning.cluster import Cluster
from ckdist.planning.machine import MachineSpec, machine_named
from ckdist.planning.predict import Predictor, Way
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
GIGABIT = {"link_rate": 0.125e9, "link_seconds": 6e-5}


def machines() -> dict[str, MachineSpec]:
    """Of the catalogue, and others by their data sheets."""
    epyc, xeon, desktop = (machine_named(name) for name in ("epyc-9175f", "xeon-6980p", "desktop"))
    pi = MachineSpec(
        name="Raspberry Pi 5", isa="neon_dotprod", cores=4, memory=8e9, bandwidth=17.1e9, core_bandwidth=10e9,
        f32=38e9, bf16=38e9, int8=154e9, **GIGABIT,
    )  # fmt: skip
    return {
        "EPYC 9175F": epyc,
        "EPYC 9135, DDR5-5600": dataclasses.replace(epyc, bandwidth=12 * 5600e6 * 8),
        "2 x Xeon 6980P": xeon,
        "Xeon 6980P": dataclasses.replace(xeon, sockets=1, nodes=3),
        "Ryzen 7950X, DDR5-3600": dataclasses.replace(desktop, bandwidth=2 * 3600e6 * 8),
        "Ryzen 5900X, DDR4-3600": dataclasses.replace(
            desktop, isa="avx2", cores=12, bandwidth=2 * 3600e6 * 8, f32=134e9, bf16=134e9, int8=200e9
        ),
        "Raspberry Pi 5": pi,
    }


@dataclass(frozen=True)
class Published:
    """`decode` and `prefill` (0: not told) in tokens per second; `context`: tokens before those that were decoded."""

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


def predictor(one: Published) -> Predictor:
    """Of the model on the machine of a result, by tensors."""
    configs = {"llama-3-8b": LLAMA_8B, "llama-3.2-3b": LLAMA_3B, "mixtral-8x7b": MIXTRAL}
    if one.model in configs:
        checkpoint = describe_config(configs[one.model], one.model, one.kind)
    else:
        checkpoint = describe(shape_path(one.model), one.kind)
    return Predictor(checkpoint, Cluster(machines()[one.machine], one.hosts, one.threads), Way("tensor"))


def rows():
    """Each result with the predicted tokens per second of decode, and of prefill."""
    for one in PUBLISHED:
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
