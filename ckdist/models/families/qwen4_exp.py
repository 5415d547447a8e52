"""Qwen3.8-Flash-Next, the text part: Qwen 3.5 with experts, sparse attention, gated streams and embeddings of n-grams.

Norms multiply by (1 + weight). Three of four layers have linear attention. The others see the blocks that an indexer
chooses. The layer that predicts further tokens is left out.
"""

from dataclasses import replace

from ckdist.models import from_config, limits, qwen4_gguf
from ckdist.models.config_keys import sizes
from ckdist.models.families import family, qwen2moe, qwen35, qwen35moe
from ckdist.models.families.family import Family, Fields, GgufWriter
from ckdist.models.gated_fields import GatedStreams, Ngrams, multipliers, primes_from
from ckdist.models.indexers import MeanIndexer
from ckdist.models.spec import LayerSpec, ModelSpec
from ckdist.program.routing import Routing

KEYS = qwen35moe.KEYS.but(
    defaults={
        **sizes(layers=40), "hc_count": 4, "hc_lowrank": 320, "heads_per_ngram": 8,
        "make_ngram_vocab_size_divisible_by": 128, "ngram_size": 3, "ngram_vocab_size_base": 20_000_000,
        "norm_topk_prob": True, "num_experts": 512, "num_experts_per_tok": 10, "partial_rotary_factor": 1.0,
        "ple_conv_kernel_size": 4, "seed": 1234, "split_ngram_parts": 512,
    },
    only={"indexer_kv_heads": 1},
    unused=("mtp", "number_of_conv_states"),
)  # fmt: skip
ROUTING = Routing(used=10)


def ngrams(f: Fields, n: from_config.Sizes) -> Ngrams | None:
    """Reads the embeddings of n-grams from a config.json. Raises ModelFileError for several layers with them."""
    name, size = "ple_layer_ids", f.integer
    numbers = f.raw(name) or []
    if not isinstance(numbers, list) or len({*map(str, numbers)}) > 1:
        raise f.error(name, numbers, "a list of at most one layer")
    if not numbers:
        return None
    layer = f.but({name: numbers[0]}).integer(name, high=n.num_layers) - 1  # counted from 1
    tokens, each = size("ngram_size", low=2, high=8), size("heads_per_ngram", high=64)
    count, width = (tokens - 1) * each, size("ple_embed_dim", n.hidden_size, high=limits.MAX_WIDTH)
    if width % count or count > 64:
        raise f.error("ple_embed_dim", width, f"a multiple of the {count} hashes, at most 64")
    of_hashes = primes_from(size("ngram_vocab_size_base", high=1 << 28), count)
    unit, parts = size("make_ngram_vocab_size_divisible_by"), size("split_ngram_parts", high=1 << 14)
    rows = -(-sum(of_hashes) // unit) * unit
    if rows % parts:
        raise f.error("split_ngram_parts", parts, f"a divisor of the {rows} rows of n-grams")
    ends = f.raw("eos_token_id")
    end = f.but({"eos_token_id": ends[0] if isinstance(ends, list) and ends else ends})
    factors = multipliers(n.vocab_size, tokens, size("seed", low=0, high=1 << 62))
    return Ngrams(
        layer, width // count, rows // parts, parts, each, end.integer("eos_token_id", low=0, high=n.vocab_size - 1),
        size("ple_conv_kernel_size", high=limits.MAX_CONV), factors, of_hashes, qwen4_gguf.begins(of_hashes),
    )  # fmt: skip


def config(f: Fields, outer: Fields) -> ModelSpec:
    n = from_config.sizes(f)
    gate = f.choice("output_gate_type", ("sigmoid", "silu"), f.text("hidden_act"))
    linear = replace(qwen35.delta_net(f), output_gate=gate)
    ropes = from_config.rotations(f, n, from_config.part(f), mrope_interleaved=True)
    names = ("indexer_n_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
    indexer = MeanIndexer(*(f.integer(name, high=limits.MAX_POSITION) for name in names))
    qwen4_gguf.check(indexer, ropes["global"], f, names)
    full = n.attention(qk_norm="head", gated="sigmoid", indexer=indexer)
    usual = from_config.periodic(n.num_layers, f.integer("full_attention_interval"))
    linears = from_config.layers_of_kind(f, n.num_layers, usual, qwen35.LINEAR, qwen35.FULL, "indexed_attention")
    ffn = qwen2moe.experts(f, replace(ROUTING, renormalise=f.flag("norm_topk_prob")))
    layers = [LayerSpec(linear if one else full, ffn) for one in linears]
    streams = GatedStreams(f.integer("hc_count", low=2, high=8), f.integer("hc_lowrank"), ngrams(f, n))
    return from_config.model(f, outer, n, layers, ropes, streams=streams)


INDEX = {
    "self_attn.indexer.index_qk_proj": ("self_attn.index_q_proj", "self_attn.index_k_proj"),
    **{f"self_attn.indexer.{part}_layernorm": f"self_attn.index_{part}_norm" for part in "qk"},
}
FAMILY = Family(
    keys=KEYS,
    from_config=config,
    from_gguf=qwen4_gguf.gguf,
    to_gguf=GgufWriter(qwen4_gguf.written, ("expert_shared_feed_forward_length",), renormalised=False),
    safetensors=qwen35.SAFETENSORS.but(
        {**family.SAFETENSORS_EXPERTS.rules, "model.layers.{}.ple.ple_embedding.ngram_embedding": "model.embed_ngrams"},
        (r".*\.ple\.norm_\w+\.weight", "plus_one"),
    ).but_in_layers(INDEX),
    gguf_names=qwen4_gguf.NAMES,
    gguf_values=qwen4_gguf.values,
    ignored=(*family.ROTATIONS, qwen4_gguf.HASHES),
)
