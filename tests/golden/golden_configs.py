"""Configurations of golden models: all without experts and linear attention, and some with experts."""

COMMON = {
    "hidden_size": 64,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 48,
}

GEMMA4_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}

# config.json as the hubs have it: rope_theta and rope_scaling at the top level. qwen3 has `rope_parameters`, as
# transformers 5 writes.
DENSE = {
    "llama2": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "intermediate_size": 72, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False,
    },
    "llama3": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 210, "hidden_size": 96, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE,
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False,
    },
    "mistral": {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 257, "intermediate_size": 100,
        "num_hidden_layers": 2, "num_attention_heads": 5, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": 24, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 256, "intermediate_size": 76, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_sliding_window": False,
        "sliding_window": 32, "max_window_layers": 2, "hidden_act": "silu", "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 250, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "attention_bias": False, "use_sliding_window": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}, "hidden_act": "silu", "tie_word_embeddings": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "vocab_size": 256, "intermediate_size": 56, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 6.0, "final_logit_softcapping": 8.0, "sliding_window": 20, "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False, "tie_word_embeddings": True,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 200, "hidden_size": 96, "intermediate_size": 24,
        "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 16,
        "sliding_window": 18, "sliding_window_pattern": 3, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": True,
    },
    # Gates cut in some layers, feed-forwards of two widths, caches that later layers share, a smaller per-layer table.
    "gemma3n": {
        "architectures": ["Gemma3nForCausalLM"], "model_type": "gemma3n_text", "vocab_size": 100, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": [40, 40, 72, 40], "num_hidden_layers": 4, "num_attention_heads": 3, "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.9, 0.0, 0.75, 0.0], "altup_num_inputs": 4, "laurel_rank": 6, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 90, "sliding_window": 18, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
        "final_logit_softcapping": 8.0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    # As E2B: full layers with wider heads, caches that later layers share, a wider MLP there, per-layer embeddings.
    "gemma4": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 120, "hidden_size": 32, "intermediate_size": 20,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "head_dim": 8, "global_head_dim": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2, "num_kv_shared_layers": 3,
        "attention_k_eq_v": False, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 120,
        "sliding_window": 18, "final_logit_softcapping": 8.0, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "rope_parameters": GEMMA4_ROPE, "enable_moe_block": False, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    # As 26B-A4B: experts beside an MLP; keys of full layers are their values.
    "gemma4_moe": {
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "vocab_size": 123, "hidden_size": 32, "intermediate_size": 20,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "head_dim": 8, "global_head_dim": 16,
        "num_global_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention", "full_attention"], "num_kv_shared_layers": 0,
        "attention_k_eq_v": True, "hidden_size_per_layer_input": 0, "sliding_window": 20, "final_logit_softcapping": 8.0,
        "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "rope_parameters": GEMMA4_ROPE, "enable_moe_block": True,
        "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 16, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    # Sliding layers have sinks and more kv-heads; values are narrower than keys, and scaled.
    "mimo_v2_flash": {
        "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "vocab_size": 127, "hidden_size": 32, "head_dim": 24,
        "v_head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": None, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"], "sliding_window": 18, "attention_value_scale": 0.707, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": True, "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.334},
        },
    },
    # Attention within chunks, layers without rotation whose queries are scaled by position, dense layers between others.
    "llama4": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "vocab_size": 125, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 16, "intermediate_size_mlp": 40, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 500.0, "rope_scaling": LLAMA3_ROPE, "num_local_experts": 5, "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2, "use_qk_norm": True, "no_rope_layers": [1, 1, 0, 1], "attention_chunk_size": 20,
        "attn_temperature_tuning": True, "floor_scale": 6, "attn_scale": 0.3, "hidden_act": "silu", "tie_word_embeddings": False,
        "attention_bias": False, "pad_token_id": 0,
    },
    # longrope's long factors: every text is longer than the original context. And its short ones, with a part rotated.
    "phi3": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 255, "intermediate_size": 88, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "original_max_position_embeddings": 4,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0, 1.1, 1.3, 1.8, 2.5, 4.0, 6.0, 9.5],
                         "attention_factor": 1.19},
        "sliding_window": 40, "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "phi4": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "vocab_size": 256, "intermediate_size": 52, "num_hidden_layers": 2,
        "hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "original_max_position_embeddings": 512, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0, 3.0, 4.5], "long_factor": [2.0] * 6},
        "sliding_window": None, "hidden_act": "silu", "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 254, "intermediate_size": 84, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "hidden_act": "silu",
        "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": 0,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "vocab_size": 221, "intermediate_size": 60, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_theta": 500000.0, "sliding_window": 22,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2079441541679836,
                         "beta_fast": 32.0, "beta_slow": 1.0},
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": 0,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"], "model_type": "granite", "vocab_size": 230, "intermediate_size": 100, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
        "embedding_multiplier": 12.0, "attention_multiplier": 0.2, "residual_multiplier": 0.35, "logits_scaling": 0.25,
        "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "vocab_size": 249, "intermediate_size": 68, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 5000000.0, "hidden_act": "silu",
        "no_rope_layers": [1, 0], "no_rope_layer_interval": 4, "use_sliding_window": False, "sliding_window": None,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 247, "intermediate_size": 76, "num_hidden_layers": 2,
        "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": True, "pad_token_id": 0,
    },
    "seed_oss": {
        "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss", "vocab_size": 248, "intermediate_size": 84,
        "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "attention_bias": True,
        "attention_dropout": 0.1, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1,
        "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 1,
    },
    "ernie4_5": {
        "architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "vocab_size": 251, "intermediate_size": 88,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 500000, "use_bias": False, "hidden_act": "silu", "tie_word_embeddings": True, "pad_token_id": 0,
    },
    "hunyuan_v1_dense": {
        "architectures": ["HunYuanDenseV1ForCausalLM"], "model_type": "hunyuan_v1_dense", "vocab_size": 244,
        "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "attention_head_dim": 16, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "use_qk_norm": True, "use_cla": False,
        "rope_scaling": {"alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0, "type": "dynamic"},
        "hidden_act": "silu", "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    # Windows with a rotation, and a layer with neither.
    "exaone4": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "vocab_size": 235, "intermediate_size": 72,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "rope_theta": 1000000, "sliding_window": 20, "sliding_window_pattern": "LLLG", "reorder_qk_norm": True,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                         "original_max_position_embeddings": 48, "rope_type": "llama3"},
        "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # Queries scaled by position: the text has five steps of the scale.
    "ministral3": {
        "architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "vocab_size": 239,
        "intermediate_size": 76, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "sliding_window": None,
        "rope_parameters": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.4,
                            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 12,
                            "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn"},
        "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "gemma": {
        "architectures": ["GemmaForCausalLM"], "model_type": "gemma", "vocab_size": 252, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "hidden_act": "gelu", "attention_bias": False, "tie_word_embeddings": True,
    },
    # The text parts of models that read images too: their positions have three axes.
    "qwen25vl": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "text_config": {
            "model_type": "qwen2_5_vl_text", "vocab_size": 236, "intermediate_size": 76, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": None, "hidden_size": 96, "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0, "rope_scaling": {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"},
            "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 2, "hidden_act": "silu",
        },
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8,
            "out_hidden_size": 96, "patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 1,
            "in_channels": 1, "fullatt_block_indexes": [0], "window_size": 4,
        },
        "image_token_id": 232, "video_token_id": 233, "vision_start_token_id": 234, "vision_end_token_id": 235,
        "tie_word_embeddings": False,
    },
    "qwen3vl": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl",
        "text_config": {
            "model_type": "qwen3_vl_text", "vocab_size": 233, "intermediate_size": 72, "num_hidden_layers": 2,
            "num_attention_heads": 6, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 5000000,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "hidden_act": "silu", "attention_bias": False,
        },
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8,
            "out_hidden_size": 64, "num_position_embeddings": 4, "patch_size": 2, "temporal_patch_size": 1,
            "spatial_merge_size": 1, "in_channels": 1, "deepstack_visual_indexes": [],
        },
        "image_token_id": 229, "video_token_id": 230, "vision_start_token_id": 231, "vision_end_token_id": 232,
        "tie_word_embeddings": True,
    },
    # Experts. The second layer of qwen3moe has none.
}  # fmt: skip

EXPERTS = {
    "solar_open": {
        "architectures": ["SolarOpenForCausalLM"], "model_type": "solar_open", "vocab_size": 120, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 1.0, "n_routed_experts": 5, "num_experts_per_tok": 2,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True,
        "first_k_dense_replace": 0, "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "hy_v3": {
        "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 121, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "num_experts": 5,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1, "router_scaling_factor": 1.7, "route_norm": True,
        "qk_norm": True, "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "exaone_moe": {
        "architectures": ["ExaoneMoeForCausalLM"], "model_type": "exaone_moe", "vocab_size": 90, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 24, "moe_intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 18, "sliding_window_pattern": "LLG",
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
        "num_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.7,
        "norm_topk_prob": True, "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    "mellum": {
        "architectures": ["MellumForCausalLM"], "model_type": "mellum", "vocab_size": 90, "hidden_size": 32, "head_dim": 8,
        "intermediate_size": 40, "moe_intermediate_size": 12, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "sliding_window": 18,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "mlp_layer_types": ["sparse"] * 3,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "pad_token_id": 0,
    },
    # A gate for each element of heads, norms before and after each part, full layers without rotation.
    "afmoe": {
        "architectures": ["AfmoeForCausalLM"], "model_type": "afmoe", "vocab_size": 96, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 4, "num_dense_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "rope_scaling": None, "num_experts": 4,
        "num_experts_per_tok": 2, "num_shared_experts": 1, "route_norm": True, "route_scale": 1.7, "score_func": "sigmoid",
        "n_group": 1, "topk_group": 1, "mup_enabled": True, "global_attn_every_n_layers": 4, "sliding_window": 18,
        "hidden_act": "silu", "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # A gate for each head by softplus, more heads and another rotation in sliding layers.
    "laguna": {
        "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": 95, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 32, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 20, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_attention_heads_per_layer": [4, 6, 4], "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse", "sparse"],
        "mlp_only_layers": [0], "sliding_window": 18, "gating": "per-head", "num_experts": 4, "num_experts_per_tok": 2,
        "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 64,
                               "beta_slow": 1.0, "beta_fast": 64.0, "attention_factor": 1.2079441541679836, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # The same with a gate for each element, in layers without a window.
    "laguna_m": {
        "architectures": ["LagunaForCausalLM"], "model_type": "laguna", "vocab_size": 94, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 32, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "layer_types": ["full_attention"] * 2, "mlp_layer_types": ["dense", "sparse"], "gating": "per-element", "num_experts": 4,
        "num_experts_per_tok": 2, "moe_routed_scaling_factor": 2.5,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5}},
        "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # A gate for each head, limits of experts in the last layer, another number of heads and rotation in sliding layers.
    "step3p5": {
        "architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7",
        "text_config": {
            "model_type": "step3p5", "vocab_size": 93, "hidden_size": 24, "head_dim": 8, "intermediate_size": 32,
            "moe_intermediate_size": 8, "share_expert_dim": 20, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_attention_groups": 2, "rms_norm_eps": 1e-5, "moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "1,2",
            "moe_router_scaling_factor": 1.7, "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_other_setting": {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2,
                                        "head_dim": 8},
            "partial_rotary_factors": [0.5, 1.0, 0.5], "rope_theta": [5000000.0, 10000.0, 5000000.0],
            "rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 32.0}, "yarn_only_types": ["full_attention"], "sliding_window": 18,
            "swiglu_limits": [0.0, 0.0, 1.0], "swiglu_limits_shared": [0.0, 0.0, 1.5], "use_head_wise_attn_gate": True,
            "use_qk_norm": True, "use_moe_router_bias": True, "norm_expert_weight": True, "need_fp32_gate": True,
            "moe_router_activation": "sigmoid", "zero_centered": True, "att_impl_type": "GQA", "num_nextn_predict_layers": 0,
        },
        "vision_config": {
            "model_type": "step3p5_vision", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 8,
            "patch_size": 2, "mlp_ratio": 1.0, "max_position_embeddings": 16,
        },
        "image_token_id": 93, "tie_word_embeddings": False,
    },
    # Normed embeddings, norms of two epsilons, queries and keys of length one, gates, layers without rotation.
    "muse_glimmer": {
        "architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer",
        "text_config": {
            "model_type": "muse_glimmer_text", "vocab_size": 97, "hidden_size": 24, "head_dim": 8, "intermediate_size": 32,
            "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "post_norm_eps": 0.01,
            "sliding_window": 18, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
            "layer_rope_theta": [500000.0, 500000.0, 500000.0, 0], "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "qk_scale_factor": 3.87, "output_multiplier": 0.5, "final_logit_softcapping": 8.0, "hidden_activation": "silu",
            "attention_bias": False,
        },
        "vision_config": {
            "model_type": "muse_glimmer_vision", "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1,
            "num_hidden_layers": 1, "patch_size": 2, "patch_temporal": 1, "merge_size": 1, "pos_emb_height": 2, "pos_emb_width": 2,
            "layer_types": ["full_attention"],
        },
        "out_hidden_size": 8, "projector_hidden_size": 8, "image_token_id": 97, "video_token_id": 98, "tie_word_embeddings": False,
    },
    # Kimi Delta Attention with bounded decays and no low rank; latent attention with a gate for each head.
    "bailing_hybrid": {
        "architectures": ["BailingHybridForCausalLM"], "model_type": "bailing_hybrid", "vocab_size": 98, "hidden_size": 24,
        "head_dim": 8, "max_position_embeddings": 512, "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 3, "rms_norm_eps": 1e-6, "hidden_act": "silu", "first_k_dense_replace": 1, "kv_lora_rank": 16,
        "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "layer_group_size": 3,
        "short_conv_kernel_size": 4, "kda_safe_gate": True, "kda_lower_bound": -5.0, "moe_intermediate_size": 8, "num_experts": 8,
        "num_experts_per_tok": 3, "num_shared_experts": 1, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "rope_theta": 6000000.0, "rope_scaling": None, "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # The delta rule with weights up to 2, norms before linear attention and after full attention, no rotation.
    "olmo_hybrid": {
        "architectures": ["OlmoHybridForCausalLM"], "model_type": "olmo_hybrid", "vocab_size": 99, "hidden_size": 32, "head_dim": None,
        "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 3,
        "linear_num_value_heads": 3, "linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True, "rope_parameters": {"rope_theta": None, "rope_type": "default"}, "hidden_act": "silu", "attention_bias": False,
        "tie_word_embeddings": False, "pad_token_id": 0,
    },
    # Families that are nearly other ones.
    "arcee": {
        "architectures": ["ArceeForCausalLM"], "model_type": "arcee", "vocab_size": 90, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "hidden_act": "relu2", "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    "cwm": {
        "architectures": ["CwmForCausalLM"], "model_type": "cwm", "vocab_size": 89, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5,
        "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 18, "rope_theta": 1000000.0,
        "rope_scaling": LLAMA3_ROPE, "hidden_act": "silu", "tie_word_embeddings": False, "mlp_bias": False, "pad_token_id": 0,
    },
    "vaultgemma": {
        "architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma", "vocab_size": 88, "hidden_size": 24, "head_dim": 8,
        "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 6.0, "final_logit_softcapping": 8.0,
        "sliding_window": 18, "layer_types": ["sliding_attention", "full_attention"], "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False, "tie_word_embeddings": True,
    },
    # Sinks in all layers, the first of which does not rotate.
    "granite_swa": {
        "architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa", "vocab_size": 87, "hidden_size": 24, "head_dim": None,
        "intermediate_size": 36, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 1, "rms_norm_eps": 1e-5,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "layer_rope_theta": [0, 10000.0, 10000.0],
        "sliding_window": 18, "rope_theta": 10000.0, "embedding_multiplier": 12.0, "attention_multiplier": 0.3,
        "residual_multiplier": 0.35, "logits_scaling": 0.25, "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    "youtu": {
        "architectures": ["YoutuForCausalLM"], "model_type": "youtu", "vocab_size": 86, "hidden_size": 24, "head_dim": None,
        "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3, "rms_norm_eps": 1e-6,
        "rope_theta": 1600000, "rope_scaling": None, "rope_interleave": True, "hidden_act": "silu", "kv_lora_rank": 16,
        "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "tie_word_embeddings": False,
        "attention_bias": False, "mlp_bias": False, "pad_token_id": 0,
    },
    # Windows of 4 tokens, of which a token sees 3 and the last, incomplete one.
    "glm5_next": {
        "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next",
        "text_config": {
            "model_type": "glm5_next_text", "vocab_size": 101, "hidden_size": 16, "head_dim": 0, "intermediate_size": 20,
            "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "hidden_act": "silu",
            "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 0, "qk_head_dim": 8, "v_head_dim": 8,
            "mla_use_nope": True, "index_n_heads": 12, "index_head_dim": 16, "index_topk": 12, "indexer_types": ["full"] * 3,
            "indexer_rope_interleave": True, "index_kpool": 4, "index_kpool_compress": True,
            "index_kpool_always_select_tail": True, "index_share_for_mtp_iteration": True,
            "linear_attn_config": {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
                                   "kda_layers": [0, 2], "full_attn_layers": [1]},
            "layer_types": ["linear_attention", "deepseek_sparse_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"], "first_k_dense_replace": 1, "mhc": True, "hc_mult": 4,
            "hc_eps": 1e-6, "hc_sinkhorn_iters": 20, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1,
            "moe_intermediate_size": 8, "moe_router_dtype": "float32", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "swiglu_limit": 10.0,
            "num_nextn_predict_layers": 0, "attention_bias": False, "pad_token_id": 0, "tie_word_embeddings": False,
        },
        "vision_config": {"model_type": "glm5_next_vision", "depth": 1, "hidden_size": 8, "num_heads": 1, "intermediate_size": 8,
                          "out_hidden_size": 16, "patch_size": 2, "temporal_patch_size": 1, "spatial_merge_size": 1, "in_channels": 1,
                          "image_size": 4, "projection_intermediate_size": 8},
        "image_token_id": 97, "video_token_id": 98, "image_start_token_id": 99, "image_end_token_id": 100,
        "tie_word_embeddings": False,
    },
    # The second layer sees the positions of the first one, 21 of more than 200.
    "hy_v4": {
        "architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "vocab_size": 107, "hidden_size": 16, "head_dim": 8,
        "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16,
        "v_head_dim": 8, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "index_n_heads": 12, "index_head_dim": 16,
        "index_topk": 21, "indexer_types": ["full", "shared", "full"], "layer_types": ["deepseek_sparse_attention"] * 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"], "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.827, "n_group": 1, "topk_group": 1,
        "swiglu_limit": 10.0, "hc_mult": 4, "hc_magnitude": 2.0, "hc_eps": 1e-6, "enable_ihc": True, "gated_mla": True,
        "gating_type": "elementwise", "learnable_sink": True, "learnable_sink_init": 0.0, "use_dsa": True, "use_mla": True,
        "enable_lm_head_fp32": True, "num_nextn_predict_layers": 0, "attention_bias": False, "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
}  # fmt: skip
