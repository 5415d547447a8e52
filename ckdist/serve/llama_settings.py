"""A request's settings under llama-server's names, as in its `generation_settings` and /props."""

from typing import Any

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling import SamplingParams
from ckdist.serve.requests.sampling import LLAMA_RANDOM_SEED

OWN_NAMES = {"repetition_penalty": "repeat_penalty"}
SAME_NAMES = [
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "repeat_last_n",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "min_keep",
    "ignore_eos",
]


def llama_settings(
    sampling: SamplingParams, max_tokens: int, stops: tuple[str, ...] = (), stream: bool = False
) -> dict[str, Any]:
    """Returns the settings of an answer. `max_tokens` -1: no limit but the context."""
    same = {OWN_NAMES.get(name, name): getattr(sampling, name) for name in SAME_NAMES}
    return {
        "seed": LLAMA_RANDOM_SEED if sampling.seed is None else sampling.seed,
        **same,
        "repeat_last_n": -1 if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "stop": list(stops),
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
        "min_tokens": sampling.min_tokens,
        "n_keep": 0,
        "n_discard": 0,
        "stream": stream,
        "logit_bias": [{"token": token, "bias": bias} for token, bias in sampling.logit_bias.items()],
        "n_probs": sampling.logprobs or 0,
        "grammar": "",
        "samplers": list(sampling.samplers or SAMPLERS),
        "post_sampling_probs": False,
        "lora": [],
    }
