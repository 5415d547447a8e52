"""Configurations of golden models with sparse latent attention, for make_golden.py."""

SPARSE = {
    # Sparse attention over 21 positions of more than 200, and other sizes and a window of 12 in the second layer.
    "dots3_note": {
        "architectures": ["Dots3NoteForCausalLM"], "model_type": "dots3_note_text", "vocab_size": 109, "hidden_size": 16,
        "intermediate_size": 20, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 12, "swa_num_attention_heads": 5, "swa_num_key_value_heads": 5, "swa_q_lora_rank": 12,
        "swa_kv_lora_rank": 24, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 8,
        "swa_rope_theta": 50.0, "rope_theta": 10000.0, "sliding_window_size": 12, "index_n_heads": 12, "index_head_dim": 16,
        "index_topk": 21, "layer_types": ["full_attention", "sliding_attention", "full_attention"], "use_dsa": True,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1,
        "moe_intermediate_size": 12, "moe_shared_expert_intermediate_size": 12, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": True, "routed_scaling_factor": 1.5, "attention_bias": False, "tie_word_embeddings": False,
        "pad_token_id": 0,
    },
}  # fmt: skip
