"""One model under two layouts: prints a rank's program, and shows that the logits are the same.

    python examples/tensor_parallel.py                          # one rank
    ckdist launch -n 2 --no-prefix python examples/tensor_parallel.py    # two, each with half of every matrix

The forward is written once. A layout names the dimensions that are sharded over ranks. If a value is then only a
partial sum, the trace has an `all_reduce`.
"""

from ckdist import LLM
from ckdist.engine.load_model import BUNDLED
from ckdist.layout import SINGLE, TENSOR, Layout
from ckdist.mesh import Mesh
from ckdist.models.decoder import forward
from ckdist.program.tracer import trace
from ckdist.weights.checkpoint import open_checkpoint

PROMPT = "def main("


def first_layer(layout: Layout, ranks: int) -> list[str]:
    """Returns the instructions of the first layer on rank 0."""
    program = trace(forward, open_checkpoint(BUNDLED).spec, layout, Mesh({"tp": ranks}))
    text, _, _ = str(program).partition("@model.layers.1.")
    return [line.strip()[:110] for line in text.splitlines() if "layers.0." in line or "all_reduce" in line]


def main() -> None:
    with LLM(threads=1, ctx_size=256, repack="off", cache_type_k="f32", cache_type_v="f32") as llm:
        # only rank 0 enters; the others compute in LLM until it is closed
        ids = llm.tokenizer.encode(PROMPT)
        logits = llm.logits(ids)[-1]  # (vocab,)
    for name, layout, ranks in (("one rank", SINGLE, 1), ("each of two", TENSOR, 2)):
        print(f"{name}:")
        print(*(f"  {line}" for line in first_layer(layout, ranks)), sep="\n")
    best = logits.argsort()[::-1][:5]
    print(f"after {PROMPT!r}:", ", ".join(f"{llm.tokenizer.decode([t])!r} {logits[t]:.3f}" for t in best.tolist()))


if __name__ == "__main__":
    main()
