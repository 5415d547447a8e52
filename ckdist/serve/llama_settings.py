"""A request's settings under llama-server's names, as in its `generation_settings` and /props."""

from typing import Any

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling_params import PARAMETERS, SamplingParams
from ckdist.serve.requests.sampling_fields import LLAMA_RANDOM_SEED


def llama_settings(
    sampling: SamplingParams, max_tokens: int, stops: tuple[str, ...] = (), stream: bool = False
) -> dict[str, Any]:
    """Returns the settings of an answer. `max_tokens` -1: no limit but the context."""
    return {
        **{item.metadata["props"] or item.name: getattr(sampling, item.name) for item in PARAMETERS},
        "seed": LLAMA_RANDOM_SEED if sampling.seed is None else sampling.seed,
        "repeat_last_n": -1 if sampling.repeat_last_n is None else sampling.repeat_last_n,
        "stop": list(stops),
        "max_tokens": max_tokens,
        "n_predict": max_tokens,
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
