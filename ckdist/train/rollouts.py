"""Samples answers with the serving engine, which has the trained adapter in one of its slots."""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ckdist.comm.world import SingleWorld
from ckdist.config.engine_config import EngineConfig
from ckdist.engine.engine_sizes import EngineSizes, engine_sizes
from ckdist.engine.load_model import load_model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.sampling_params import SamplingParams
from ckdist.errors import EngineError
from ckdist.train.config import TrainConfig
from ckdist.weights.adapter_file import Lora, save_adapter

NAME = "policy"  # of the adapter
MOST_PARALLEL = 64  # answers that are sampled at once
LEAST_CACHE = 1 << 16  # bytes, of --kv-memory
LOAD_SECONDS = 300.0  # most time to load an adapter


class Sampled(NamedTuple):
    """An answer. `logprobs` are the engine's; the token that ends an answer has none."""

    tokens: list[int]
    logprobs: list[float]
    has_end: bool


class Rollouts:
    """One rank's engine, over the base model in `path`. Its owner closes it."""

    def __init__(self, config: TrainConfig, path: Path, lora: Lora, threads: int) -> None:
        self.config, self.lora = config, lora
        settings = _settings(config, path, lora, threads)
        settings = replace(settings, kv_memory=_cache_bytes(settings, engine_sizes(settings)))
        self.model = load_model(settings, SingleWorld())
        self.engine, self.tokenizer = make_engine(self.model, settings)
        self.engine.named_adapters().slots.is_exact = not config.bf16

    def load(self, weights: Mapping[str, np.ndarray]) -> None:
        """Makes `weights` the adapter of the next samples. Raises EngineError if the engine cannot load it."""
        with tempfile.TemporaryDirectory(prefix="ckdist-policy-") as folder:
            save_adapter(Path(folder), self.lora, "", weights, self.model.spec)
            self.engine.load_adapter(NAME, folder, replaces=True)
            until = time.monotonic() + LOAD_SECONDS
            while (load := self.engine.named_adapters().take_load()) is None:
                if time.monotonic() > until:
                    raise EngineError(f"the adapter was not loaded within {LOAD_SECONDS:.0f} s")
                time.sleep(0.0005)
        if not load.digest:
            raise EngineError(f"the adapter cannot be sampled: {load.reason}")

    def sample(self, prompts: Sequence[np.ndarray], seeds: Sequence[int]) -> list[list[Sampled]]:
        """Returns `num_generations` answers for each prompt, at temperature 1."""
        c, ends = self.config, tuple(self.tokenizer.eos_token_ids)
        todo = [(prompt, sample) for prompt in range(len(prompts)) for sample in range(c.num_generations)]
        found = [[Sampled([], [], False) for _ in range(c.num_generations)] for _ in prompts]
        waiting, running = iter(todo), 0
        at = next(waiting, None)
        while at is not None or running:
            while at is not None and self.engine.has_queue_room:
                prompt = prompts[at[0]]
                room = min(c.max_completion_length, c.max_length - len(prompt))
                params = SamplingParams(
                    room, seed=(seeds[at[0]] + at[1]) % (1 << 63), logprobs=0, ignore_eos=True, stop_token_ids=ends
                )
                self.engine.add(at, prompt.tolist(), params, adapters=((NAME, 1.0),))
                running, at = running + 1, next(waiting, None)
            for output in self.engine.step():
                if output.error is not None:
                    raise EngineError(f"an answer could not be sampled: {output.error}")
                prompt, sample = output.id  # type: ignore[misc]
                own = found[prompt][sample]
                own.tokens.extend(output.tokens)
                own.logprobs.extend(float(entry[0]) for entry in output.logprobs or ())
                if output.finish_reason is not None:
                    running -= 1
                    if output.stop_token is not None:
                        own.tokens.append(output.stop_token)
                        found[prompt][sample] = own._replace(has_end=True)
        return found

    def close(self) -> None:
        """Frees the engine."""
        self.model.close()


def sampling_bytes(config: TrainConfig, path: Path, lora: Lora) -> int:
    """Bytes of the engine of a rank."""
    settings = _settings(config, path, lora, 1)
    sizes = engine_sizes(settings)
    return sizes.weights + sizes.states + sizes.rope * sizes.context + _cache_bytes(settings, sizes)


def _settings(config: TrainConfig, path: Path, lora: Lora, threads: int) -> EngineConfig:
    cache = "i16" if config.bf16 else "f32"
    return EngineConfig(
        model=str(path),
        threads=threads,
        pipeline_parallel_size=1,
        ctx_size=config.max_length,
        parallel=min(MOST_PARALLEL, config.per_device_train_batch_size * config.num_generations),
        cache_type_k=cache,
        cache_type_v=cache,
        max_loras=2,  # an adapter is loaded into the slot that no request uses
        max_lora_rank=lora.rank,
    )


def _cache_bytes(settings: EngineConfig, sizes: EngineSizes) -> int:
    """Keys and values of all sequences that are sampled at once. Others are not kept: the next adapter changes them."""
    return max(LEAST_CACHE, (settings.parallel * sizes.blocks + 1) * sizes.block)
