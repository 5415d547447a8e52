"""The weights that a dense decoder has: Hugging Face names and shapes, from its ModelSpec.

It says nothing about files.
"""

from ckdist.models.spec import ModelSpec

EMBEDDING = "model.embed_tokens.weight"
OUTPUT = "lm_head.weight"


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape, (out, in) or (n,), of every weight that the forward reads; tied embeddings stand there once."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, hidden)}

    def linear(name: str, rows: int, cols: int, bias: bool) -> None:
        """Adds a matrix of (rows, cols) and its bias."""
        shapes[f"{name}.weight"] = (rows, cols)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    for i in range(spec.num_layers):
        layer = f"model.layers.{i}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        linear(f"{layer}.self_attn.q_proj", q_rows, hidden, spec.qkv_bias)
        linear(f"{layer}.self_attn.k_proj", kv_rows, hidden, spec.qkv_bias)
        linear(f"{layer}.self_attn.v_proj", kv_rows, hidden, spec.qkv_bias)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (spec.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (spec.head_dim,)
        linear(f"{layer}.self_attn.o_proj", hidden, q_rows, spec.o_bias)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if spec.post_norms:
            shapes[f"{layer}.pre_feedforward_layernorm.weight"] = (hidden,)
        linear(f"{layer}.mlp.gate_proj", ffn, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.up_proj", ffn, hidden, spec.mlp_bias)
        linear(f"{layer}.mlp.down_proj", hidden, ffn, spec.mlp_bias)
        if spec.post_norms:
            shapes[f"{layer}.post_feedforward_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not spec.tie_embeddings:
        shapes[OUTPUT] = (spec.vocab_size, hidden)
    return shapes
