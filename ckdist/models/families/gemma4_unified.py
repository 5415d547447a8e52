"""Gemma 4 12B: Gemma 4 without per-layer embeddings and experts. Images and sound have no encoders of their own."""

from dataclasses import replace

from ckdist.models.families import gemma4

FAMILY = replace(
    gemma4.FAMILY,
    gguf="gemma4",
    keys=gemma4.KEYS.but(
        defaults={
            "hidden_size_per_layer_input": None, "max_position_embeddings": 262144, "sliding_window": 1024,
            "vocab_size_per_layer_input": None,
        },
        unused=("vocab_size_per_layer_input", "audio_samples_per_token", "num_soft_tokens_per_image"),
    ),
    from_gguf=None,
)  # fmt: skip
