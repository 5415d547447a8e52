"""What a dense decoder is, in numbers: read from `config.json` or GGUF metadata, used by the forward and the planner.

It says nothing about where weights lie or how work is sharded.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding (Su et al. 2021, arXiv:2104.09864); rotation is of halves, as in Hugging Face.

    `inverse_frequencies`: float32 (head_dim / 2,), scaling (linear, llama3, yarn) already applied.
    `magnitude`: factor on cos and sin (yarn's attention factor), else 1.
    """

    inverse_frequencies: np.ndarray = field(compare=False)
    magnitude: float = 1.0


@dataclass(frozen=True)
class ModelSpec:
    """One dense decoder-only transformer.

    Weights carry Hugging Face names. `sliding_window` is 0 where no layer slides; `sliding_layers[i]` says whether
    layer i does. `rope_local` is the rotation of sliding layers where it differs (Gemma 3), else None. Soft caps are 0
    where absent.
    """

    architecture: str  # llama, mistral, qwen2, qwen3, gemma2, gemma3
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position: int
    rope: RopeSpec
    rope_local: RopeSpec | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    activation: str = "silu"  # silu, gelu_tanh
    tie_embeddings: bool = False
    embedding_scale: float = 1.0
    attention_scale: float = 0.0  # on q.k; head_dim ** -0.5 for most
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    sliding_window: int = 0
    sliding_layers: tuple[bool, ...] = ()
