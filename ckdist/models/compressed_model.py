"""Models with compressed attention, several residual streams and experts chosen by token ids."""

from dataclasses import replace

from ckdist.models import from_config
from ckdist.models.compressed_fields import CompressedAttention
from ckdist.models.fields import Fields
from ckdist.models.residual_streams import HyperConnections
from ckdist.models.spec import LayerSpec, ModelSpec, MoeFfn, RopeSpec

SPARSE = "compressed_sparse_attention"
LIMIT = 10.0  # of the inputs of experts' gates
# Tokens of an entry -> the kind of a layer's attention
KINDS = {0: "sliding_attention", 4: SPARSE, 128: "heavily_compressed_attention"}


def read_streams(f: Fields, count: str, iterations: str, eps: str) -> HyperConnections:
    """Reads the residual streams."""
    return HyperConnections(f.integer(count, high=8), f.integer(iterations, high=1000), f.number(eps, high=1.0))


def compressed_model(
    n: from_config.Sizes,
    mixers: list[CompressedAttention],
    ffn: MoeFfn,
    by_id: list[bool],
    ropes: dict[str, RopeSpec],
    tied: bool,
    streams: HyperConnections,
) -> ModelSpec:
    """Makes a model. `by_id`: whether each layer chooses experts by token ids."""
    hashed = replace(ffn, correction_bias=False, hashed=n.vocab_size)
    layers = [LayerSpec(mixer, hashed if own else ffn) for mixer, own in zip(mixers, by_id, strict=True)]
    return n.model(layers, ropes, tied, streams=streams)
