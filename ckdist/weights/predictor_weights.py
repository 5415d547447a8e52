"""Opens the layer of a model's files that predicts the token after the next one."""

import re
from collections.abc import Iterable
from dataclasses import replace

from ckdist.errors import ConfigError
from ckdist.models.decoder import EMBEDDING, OUTPUT, weight_shapes
from ckdist.models.predictor import predictor
from ckdist.models.registry import family
from ckdist.weights.checkpoint import Checkpoint
from ckdist.weights.stored_weights import required, sources
from ckdist.weights.tensor_source import StoredTensor

# Names of both formats, without the layer's prefix -> names of RULES.
PARTS = {
    "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "proj", "shared_head.norm": "norm", "shared_head.head": "head",
    "embed_tokens": "embedding", "shared_head_norm": "norm", "shared_head_head": "head",
    "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "proj", "norm": "norm",
    "final_layernorm": "norm", "token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "swapped",
}  # fmt: skip
PAIR = re.compile(r"predictor\.(?:proj|swapped)\.weight")
RULES = {
    "predictor.enorm": "model.enorm",
    "predictor.hnorm": "model.hnorm",
    "predictor.proj": ("model.eproj", "model.hproj"),  # side by side in each row
    "predictor.swapped": ("model.hproj", "model.eproj"),
    "predictor.norm": "model.norm",
    "predictor.head": "lm_head",
    "predictor.embedding": "model.embed_tokens",
}


def open_predictor(checkpoint: Checkpoint) -> Checkpoint:
    """The layer as a model of its own, with the model's embeddings and head. Raises ConfigError if there is none."""
    spec, where = predictor(checkpoint.spec), str(checkpoint.path)
    is_gguf = checkpoint.format == "gguf"
    stored = list(_renamed(checkpoint.unread, len(checkpoint.spec.layers), "blk" if is_gguf else "model.layers"))
    if not any(PAIR.fullmatch(one.name) for one in stored):
        raise ConfigError(
            f"--spec mtp needs layers that predict tokens, and {where} has none: use --spec suffix, or --model-draft"
        )
    whole = all(layer.mixer is not None and layer.ffn is not None for layer in checkpoint.spec.layers)
    if not whole or spec.streams or spec.block_residuals:
        raise ConfigError(
            f"--spec mtp: the layers of {where} that predict tokens ({spec.family}) are not supported: use --spec "
            "suffix, or --model-draft"
        )
    own = family(spec.family)
    names = (own.gguf_names if is_gguf else own.safetensors).but(RULES, (PAIR.pattern, "alternating"))
    shapes = weight_shapes(spec)
    found, unread = sources(spec, names, stored, {OUTPUT: shapes[EMBEDDING], **shapes})
    shared = {name: source for name, source in checkpoint.tensors.items() if name in (EMBEDDING, OUTPUT)}
    if spec.tie_embeddings and OUTPUT in found:
        spec = replace(spec, tie_embeddings=False)
        shapes = weight_shapes(spec)
    second = len(checkpoint.spec.layers) + 1
    further = re.compile(rf"(?:.+\.)?(?:(?:layers|blk)\.{second}|mtp[._]layers\.[1-9]\d*)\..+")
    unused = [one.name for one in checkpoint.unread if further.fullmatch(one.name)]
    note = f"--spec mtp reads the first layer that predicts tokens: {len(unused)} tensors of others stay unused"
    tensors = required(spec, shapes, {**shared, **found}, where, unread)
    return replace(checkpoint, spec=spec, tensors=tensors, notes=(note,) * bool(unused), unread=())


def _renamed(stored: Iterable[StoredTensor], layers: int, root: str) -> Iterable[StoredTensor]:
    """The tensors of the first such layer, with the names of a model of one layer and those of RULES."""
    layer = re.compile(rf"(?:.+\.)?(?:(?:layers|blk)\.{layers}|mtp[._]layers\.0)\.(?:nextn\.)?(.+)")
    outer = re.compile(r"(?:model\.)?mtp\.([a-z_]+\.weight)")
    for one in stored:
        match = layer.fullmatch(one.name) or outer.fullmatch(one.name)
        if match is None:
            continue
        part = PARTS.get(match[1].removesuffix(".weight"))
        is_pair = part in ("proj", "swapped") and len(one.shape) == 2
        shape = (2 * one.shape[0], one.shape[1] // 2) if is_pair else one.shape
        own = match[1].replace("pre_mlp_layernorm", "post_attention_layernorm")
        yield replace(one, name=f"predictor.{part}.weight" if part else f"{root}.0.{own}", shape=shape)
