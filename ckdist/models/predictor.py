"""A layer that predicts the token after the next one, and the model that leaves the rows that it reads.

DeepSeek-AI 2024, arXiv:2412.19437, section 2.2 (multi-token prediction): x = W [norm(e); norm(h)] with the embedding e
of the next token and the row h that the model's head reads; then one layer, a norm and the model's head. The layer
reads its own rows to predict further tokens.
"""

from dataclasses import replace

from ckdist.models.blocks.norm import RowNorm
from ckdist.models.decoder import EMBEDDING, block, final_norm, hidden, logits, table
from ckdist.models.spec import DenseFfn, ModelSpec
from ckdist.models.state_mixers import GatedDeltaNet
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def predictor(spec: ModelSpec) -> ModelSpec:
    """The layer as a model of its own. It is like the model's last layer with attention to positions of its own.

    Those of MiMo (vLLM, mimo_v2_mtp.py) and dots3-note (llama.cpp) have a window and a dense feed-forward.
    """
    alone = lambda mixer: not isinstance(mixer, GatedDeltaNet) and not getattr(mixer, "shares_positions", False)
    layers = [layer for layer in reversed(spec.layers) if alone(layer.mixer)]
    layer = layers[0]
    if spec.family in ("mimo_v2_flash", "dots3_note"):
        layer = next((one for one in layers if getattr(one.mixer, "window", 0)), layer)
        layer = replace(layer, ffn=next((one.ffn for one in layers if isinstance(one.ffn, DenseFfn)), layer.ffn))
    return replace(spec, layers=(layer,), predicts=True)


def logits_and_rows(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, vocab) logits. It also marks the rows that the head reads, (outputs, hidden)."""
    x = final_norm(g, g.gather(hidden(g, ids, spec, g.select_rows)), spec)
    g.output_rows(x)
    return logits(g, x, spec)


def predict(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids of next tokens, and a row for each -> as `logits_and_rows`, for the tokens after them."""
    norm, size = RowNorm(spec.norm, spec.norm_eps), g.sharding.hidden(spec.hidden_size)
    embeddings = g.scale(g.reduce(g.embed(ids, table(g, spec, EMBEDDING))), spec.embedding_scale)
    rows = g.input_rows(ids, size)
    parts = [
        g.linear(norm(g, value, f"model.{name}norm"), g.weight(f"model.{name}proj.weight", size, size))
        for name, value in (("e", embeddings), ("h", rows))
    ]
    x = g.boundary(g.add(*parts))
    x = final_norm(g, g.gather(g.boundary(block(g, x, spec, 0, g.select_rows))), spec)
    g.output_rows(x)
    return logits(g, x, spec)
