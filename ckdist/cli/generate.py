"""`ckdist generate`: continues one prompt, streamed to the terminal or as one JSON object."""

import json
import time
from dataclasses import fields

from ckdist.cli.session import model_session
from ckdist.config.draft_config import DraftFlags
from ckdist.config.generate_config import GenerateConfig
from ckdist.config.sampling_config import SamplingConfig
from ckdist.engine.llm import LLM
from ckdist.engine.model_engine import make_engine
from ckdist.engine.sampling_params import SamplingParams


def sampling_of(config: SamplingConfig) -> SamplingParams:
    """Converts the sampling flags. Fields of equal names are copied."""
    breakers = () if config.dry_sequence_breakers == ("none",) else config.dry_sequence_breakers
    names = {field.name for field in fields(SamplingParams)} & {field.name for field in fields(SamplingConfig)}
    names -= {field.name for field in fields(DraftFlags)}  # the engine has these
    same = {name: getattr(config, name) for name in names}
    return SamplingParams(**{**same, "max_tokens": config.n_predict, "dry_sequence_breakers": breakers})


def run(config: GenerateConfig) -> int:
    """Prints the prompt and its continuation. Returns 0."""
    with model_session(config) as model:
        if model is None:
            return 0
        llm = LLM.from_engine(*make_engine(model, config))
        sampling = sampling_of(config)
        prompt = llm.tokenizer.encode(config.prompt)
        start = time.perf_counter()
        if config.json:
            (c,) = llm.generate([prompt], sampling, stop=config.stop)
            result = {
                "prompt": config.prompt,
                "text": c.text,
                "token_ids": c.token_ids,
                "finish_reason": c.finish_reason,
                "prompt_tokens": c.prompt_tokens,
                "seconds": time.perf_counter() - start,
            }
            print(json.dumps(result))
        else:
            pieces = llm.stream(prompt, sampling, stop=config.stop)
            # the first piece comes first, so that nothing is printed for a refused prompt
            print(config.prompt, next(pieces, ""), sep="", end="", flush=True)
            for piece in pieces:
                print(piece, end="", flush=True)
            print()
        llm.close()
    return 0
