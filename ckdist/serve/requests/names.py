"""Fields of other servers' requests that no reader here asks for: refused unless neutral, or without effect.

The names are those of OpenAI, vLLM, llama-server, Ollama, OpenRouter and text-generation-webui. A name that is neither
read nor in one of these tables is unknown.
"""

from ckdist.serve.requests.fields import Neutral

OFF = Neutral((False,))
NONE = Neutral()
NO_LIST = Neutral(([],))
NO_TEXT = Neutral(("",))
NO_MAP = Neutral(({},))
ZERO = Neutral((0,))
ONE = Neutral((1,))

# The answer would be another one: a constraint, a way of sampling, another model, or more in the answer than this
# server gives.
NEUTRAL = {
    # What may be written.
    "grammar_lazy": OFF,
    "grammar_triggers": NO_LIST,
    "preserved_tokens": NO_LIST,
    "structural_tag": NO_TEXT,
    "bad_words": NO_LIST,
    "allowed_token_ids": NO_LIST,
    "sequence_bias": NO_MAP,
    "n_indent": ZERO,
    "t_max_predict_ms": Neutral((0, -1), "limit max_tokens instead"),
    # How the next token is chosen.
    "use_beam_search": OFF,
    "num_beams": ONE,
    "length_penalty": ONE,
    "early_stopping": OFF,
    "do_sample": Neutral((True,), "set temperature to 0 for greedy text"),
    "tfs_z": ONE,
    "top_a": ZERO,
    "epsilon_cutoff": ZERO,
    "eta_cutoff": ZERO,
    "smoothing_factor": ZERO,
    "encoder_repetition_penalty": ONE,
    "no_repeat_ngram_size": ZERO,
    "adaptive_target": Neutral((-1,)),
    "penalty_prompt": NO_TEXT,
    "guidance_scale": ONE,
    "cfg_scale": ONE,
    "negative_prompt": NO_TEXT,
    "control_vectors": NO_LIST,
    "logits_processors": NO_LIST,
    "vllm_xargs": NO_MAP,
    # What the prompt is made of.
    "chat_template": NO_TEXT,
    "mm_processor_kwargs": NO_MAP,
    "multimodal_data": NO_LIST,
    "image_data": NO_LIST,
    "images": NO_LIST,
    "audio": NONE,
    "prompt_embeds": NO_LIST,
    "truncate_prompt_tokens": Neutral((-1,), "shorten the prompt"),
    "web_search_options": NONE,
    "plugins": NO_LIST,
    "options": Neutral(({},), "its fields are read at the top of the request"),
    # What the answer holds.
    "prompt_logprobs": Neutral((False,), "use echo with logprobs in /v1/completions"),
    "post_sampling_probs": OFF,
    "return_tokens_as_token_ids": OFF,
    "return_hidden_states": OFF,
    "include_reasoning": Neutral((True,)),
    "reasoning_format": Neutral(("none", "auto")),
    "thinking_budget": Neutral((-1,)),
    "thinking_budget_tokens": Neutral((-1,)),
    "thinking_token_budget": Neutral((-1,)),
    "reasoning_budget": Neutral((-1,)),
    "kv_transfer_params": NO_MAP,
}

# The text stays the same: who asks, how he pays, how fast it goes, what is kept, what Ollama tells its own loader.
INERT = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
        "verbosity",
        "prediction",
        "moderation",
        "parse_tool_calls",
        "tool_stream",
        "provider",
        "transforms",
        "route",
        "models",
        "usage",
        "session_id",
        "trace",
        "priority",
        "request_id",
        "data_parallel_rank",
        "spaces_between_special_tokens",
        "guided_decoding_backend",
        "allowed_local_media_path",
        "return_metrics",
        "n_cache_reuse",
        "n_keep",
        "n_discard",
        "id_slot",
        "slot_id",
        "return_progress",
        "backend_sampling",
        "sse_ping_interval",
        "penalize_nl",
        "reasoning_in_content",
        "speculative",
        "speculative.n_min",
        "speculative.n_max",
        "speculative.p_min",
        "speculative.p_split",
        "speculative.type",
        "num_ctx",
        "num_keep",
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "use_mmap",
        "use_mlock",
        "vocab_only",
        "keep_alive",
        "penalize_newline",
        "smoothing_curve",
        "api_key",
    ]
)
