"""Offline inference: prompts in, completions out, in one process with rank 0's engine, without a server."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from ckdist.comm.agreement import start_ranks
from ckdist.config.engine_config import EngineConfig
from ckdist.config.options import present_names
from ckdist.engine.engine import Engine
from ckdist.engine.load_model import load_model
from ckdist.engine.model_engine import make_engine
from ckdist.engine.output import Output
from ckdist.engine.sampling_params import SamplingParams
from ckdist.engine.text import TextStream, check_stop
from ckdist.errors import EngineError, RequestError
from ckdist.hub.resolve import resolve
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.weights.stored_pooling import stored_pooling


@dataclass
class Completion:
    """The result for one prompt.

    Attributes:
        text: The generated text. It ends before a stop string.
        token_ids: All sampled tokens.
        logprobs: One entry [chosen_logprob, [[token, logprob], ...]] per sampled token, or None.
        prompt_logprobs: The same per prompt token, or None. The first entry is None.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: str | None = None
    logprobs: list[Any] | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: list[Any] | None = None


Work: TypeAlias = tuple[str | Sequence[int], SamplingParams, Completion]  # a prompt, its parameters and its result


class LLM:
    """Generates text with one model.

    Under an MPI launcher every rank constructs the LLM. The constructor returns on rank 0 alone. The other ranks work
    inside it, and their processes end with rank 0's `close`.

    Args:
        path: A GGUF file, a folder with safetensors, or a name as for `-m`, which is fetched. None: the bundled model.
        settings: Fields of `ckdist.config.EngineConfig`: `threads`, `ctx_size`, `parallel`, `quantize` ...

    Raises:
        FetchError: The model cannot be fetched.
        CkdistError: The errors of `load_model`.
    """

    def __init__(self, path: str | None = None, **settings: Any) -> None:
        given = {name: value for name, value in settings.items() if value is not None}
        config = EngineConfig(model=None if path is None else str(path), **present_names(EngineConfig, given))
        world = start_ranks(config)
        model = load_model(replace(config, model=resolve(config.model, world)), world, embeddings=True)

        def leave() -> None:
            """Ends this rank, together with the others."""
            model.close()
            world.close()

        if world.rank != 0:
            model.work()
            leave()
            raise SystemExit(0)
        self._attach(*make_engine(model, config), leave)
        self.pooling = stored_pooling(model.checkpoint)

    @classmethod
    def from_engine(cls, engine: Engine, tokenizer: Tokenizer, close: Callable[[], None] | None = None) -> "LLM":
        """Makes an LLM over an existing engine.

        Args:
            close: Called once by `close`. Frees the resources of the engine.
        """
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer, close)  # noqa: SLF001, its own
        return llm

    def _attach(self, engine: Engine, tokenizer: Tokenizer, close: Callable[[], None] | None) -> None:
        self.engine, self.tokenizer, self._close = engine, tokenizer, close
        self._next_id, self.pooling = 0, "last"

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """Generates one completion per prompt, in their order. All prompts share batches.

        Args:
            prompts: Texts, or lists of token ids.
            sampling: For all prompts, or one per prompt.
            stop: Stop strings of all prompts.

        Raises:
            RequestError: A prompt does not fit, or a field is out of range. Nothing is left running.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        if isinstance(sampling, Sequence) and len(sampling) != len(prompts):
            raise RequestError(
                f"{len(sampling)} sampling parameters for {len(prompts)} prompts; give one, or one for each", "sampling"
            )
        stops = check_stop(stop)
        completions = [Completion() for _ in prompts]
        work = (
            (prompt, (sampling[i] if isinstance(sampling, Sequence) else sampling) or SamplingParams(), completions[i])
            for i, prompt in enumerate(prompts)
        )
        for _ in self._run(work, stops):
            pass
        return completions

    def stream(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Iterator[str]:
        """Yields the text of one completion as it is generated. Closing the iterator early ends the sequence."""
        for _, piece in self._run(iter([(prompt, sampling or SamplingParams(), Completion())]), check_stop(stop)):
            if piece:
                yield piece

    def embed(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], pooling: str | None = None, normalise: bool = True
    ) -> np.ndarray:
        """Computes one vector per prompt: float32 (prompts, hidden).

        Args:
            pooling: mean, last or cls. None: the one in the model's files, else mean for an encoder and last for a
                decoder.
            normalise: Scale each vector to length 1.

        Raises:
            RequestError: A prompt does not fit, or `pooling` is wrong.
        """
        if pooling == "none":
            raise RequestError("pooling none gives no single vector; use mean, last or cls", "pooling")
        vectors, row_of = dict[int, np.ndarray](), dict[Hashable, int]()
        todo = iter(enumerate(prompts))
        try:
            while True:
                while self.engine.has_queue_room and (item := next(todo, None)) is not None:
                    index, prompt = item
                    ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                    self.engine.embed(self._next_id, ids, pooling or self.pooling)
                    row_of[self._next_id] = index
                    self._next_id += 1
                if not row_of:
                    break
                for output in self.engine.step():
                    if output.embedding is None:
                        raise EngineError(output.error or "a prompt has no embedding")
                    vectors[row_of.pop(output.id)] = output.embedding
        finally:
            for key in row_of:
                self.engine.abort(key)
        rows = [vectors[index] for index in range(len(prompts))]
        stacked = np.stack(rows) if rows else np.empty((0, 0), np.float32)  # (prompts, hidden)
        return stacked / np.linalg.norm(stacked, axis=1, keepdims=True) if normalise else stacked

    def logits(self, token_ids: Sequence[int]) -> np.ndarray:
        """Computes the logits after every token: float32 (tokens, vocab)."""
        logits = np.empty((len(token_ids), self.engine.vocab_size), np.float32)
        begin = 0
        for chunk in self.engine.logits(list(token_ids)):  # (tokens of the chunk, vocab)
            logits[begin : begin + len(chunk)] = chunk
            begin += len(chunk)
        return logits

    def close(self) -> None:
        """Finishes storing, frees the executable and ends the other ranks. A second call does nothing."""
        self.engine.finish_storing()
        close, self._close = self._close, None
        if close is not None:
            close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, work: Iterator[Work], stops: tuple[str, ...]) -> Iterator[tuple[Completion, str]]:
        """Queues work while there is room and steps until all is done. Yields the new text of each output."""
        running: dict[Hashable, tuple[Completion, TextStream]] = {}
        try:
            while True:
                while self.engine.has_queue_room and (item := next(work, None)) is not None:
                    prompt, params, completion = item
                    ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
                    self.engine.add(self._next_id, ids, params)
                    running[self._next_id] = completion, TextStream(self.tokenizer.decoder(), stops)
                    self._next_id += 1
                if not running:
                    return
                for output in self.engine.step():
                    completion, text = running[output.id]
                    piece = _take(completion, text, output)
                    completion.text += piece
                    if text.stopped is not None and output.finish_reason is None:
                        self.engine.abort(output.id)
                        completion.finish_reason = "stop"
                    if completion.finish_reason is not None:
                        del running[output.id]
                    yield completion, piece
        finally:
            for key in running:
                self.engine.abort(key)


def _take(completion: Completion, text: TextStream, output: Output) -> str:
    """Adds an output to its completion and returns its text.

    Raises RequestError if the request is at fault, EngineError if the sequence failed otherwise.
    """
    if output.error is not None:
        raise RequestError(output.error) if output.error_status == 400 else EngineError(output.error)
    completion.prompt_tokens, completion.cached_tokens = output.prompt_tokens, output.cached_tokens
    completion.token_ids += output.tokens
    if output.prompt_logprobs is not None:
        completion.prompt_logprobs = output.prompt_logprobs
    if output.logprobs is not None:
        completion.logprobs = (completion.logprobs or []) + output.logprobs
    piece = "".join([text.step(token) for token in output.tokens])
    if output.finish_reason is not None:
        piece += text.flush()
        completion.finish_reason = "stop" if text.stopped is not None else output.finish_reason
    return piece
