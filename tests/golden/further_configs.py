"""Further configurations of golden models."""

# Blocks of 4 positions. A token sees 3 of them, and the last, incomplete one. With many index heads, no two scores are
# equal. The second layer adds embeddings of 2-grams and 3-grams. Token 7 ends their context.
FURTHER = {
    "qwen4_exp": {
        "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp",
        "text_config": {
            "model_type": "qwen4_exp_text", "vocab_size": 83, "hidden_size": 16, "head_dim": 16, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "attention_bias": False, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "full_attention_interval": 3, "output_gate_type": "sigmoid", "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "indexer_n_heads": 12, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 12,
            "indexer_compress_ratio": 4, "hc_count": 4, "hc_lowrank": 6, "ngram_size": 3, "heads_per_ngram": 2,
            "ngram_vocab_size_base": 50, "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "seed": 1234,
            "ple_embed_dim": 16, "ple_layer_ids": [2], "ple_conv_kernel_size": 4, "eos_token_id": 7, "bos_token_id": 7,
            "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "num_experts": 5,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True, "pad_token_id": None, "mamba_ssm_dtype": "float32", "partial_rotary_factor": 0.5,
            "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5,
                                "rope_theta": 10000.0, "rope_type": "default"},
            "tie_word_embeddings": False,
        },
        "vision_config": {"model_type": "qwen4_exp_vision", "depth": 1, "hidden_size": 8, "num_heads": 1,
                          "intermediate_size": 8, "out_hidden_size": 16, "patch_size": 2, "temporal_patch_size": 1,
                          "spatial_merge_size": 1, "in_channels": 1, "num_position_embeddings": 4},
        "image_token_id": 79, "video_token_id": 80, "vision_start_token_id": 81, "vision_end_token_id": 82,
        "tie_word_embeddings": False,
    },
    "nanochat": {
        "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "vocab_size": 119, "hidden_size": 48,
        "head_dim": None, "intermediate_size": 76, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "relu2",
        "final_logit_softcapping": 15.0, "attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 1,
    },
}  # fmt: skip
