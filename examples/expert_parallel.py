"""Two layouts of a mixture of experts over two hosts: slices of every expert, or whole experts.

    python examples/expert_parallel.py

With slices, every rank works on every token, and sums cross the link. With whole experts, each host has some of them,
and a token's row is sent only to the hosts of its experts: fewer bytes in more messages. The better layout depends on
the link, which `--experts auto` measures. The sizes here are those of Qwen3-30B-A3B, without its weights.
"""

from ckdist.comm.thresholds import Thresholds
from ckdist.comm.transports.link import Link
from ckdist.layout import TENSOR, with_whole_experts
from ckdist.layouts.expert_placement import choose_placement
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.models.registry import spec_from_config
from ckdist.program.tracer import trace

HOSTS = 2
SIZES = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def main() -> None:
    spec = spec_from_config(SIZES, "the example")
    for layout in (TENSOR, with_whole_experts(TENSOR, hosts=False)):
        print(f"{layout.name}:")
        for rank in range(HOSTS):
            mesh = Mesh({"tp": HOSTS}, rank)
            step = next(i for i in trace(forward, spec, layout, mesh).instrs if i.op == "experts")
            held = ", ".join("{} {} to {}".format(d.name, *d.share(mesh)) for d in step.weight(0).dims)
            print(f"  rank {rank} of the gate projections of layer 0: {held}")
    direct = Thresholds().transport_direct_bytes
    for name, link in (("1 Gbit/s", Link(50e-6, 0.118e9)), ("25 Gbit/s", Link(20e-6, 2.9e9))):
        for rows in (1, 512):
            _, reason = choose_placement(spec, HOSTS, HOSTS, link, rows, direct, dispatches=True)
            print(f"{name}: {reason}")


if __name__ == "__main__":
    main()
