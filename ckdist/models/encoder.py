"""The forward of an encoder whose output a decoder attends to."""

from ckdist.errors import ConfigError
from ckdist.models.blocks.cross_attention import store_cross
from ckdist.models.decoder import final_norm, hidden
from ckdist.models.spec import ModelSpec
from ckdist.program.program import Value
from ckdist.program.tracer import Tracer


def encode(g: Tracer, ids: Value, spec: ModelSpec) -> Value:
    """(tokens,) ids -> (outputs, hidden) of the encoder after its last norm, for the tokens that the batch selects.

    It also caches the keys and values of each layer's cross-attention.
    """
    encoder = spec.encoder
    if encoder is None:
        raise ConfigError(f"{spec.family} has no encoder")
    x = hidden(g, ids, encoder)
    read = final_norm(g, x, encoder)
    for i, layer in enumerate(spec.layers):
        if layer.cross is not None:
            path = f"{spec.root}.layers.{i}.cross_attn"
            store_cross(g, read, layer.cross.attention, path, spec.first_cross_cache + i)
    return g.output_rows(final_norm(g, g.select_rows(x), encoder))
