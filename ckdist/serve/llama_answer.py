"""Answers of llama-server's /completion, whole and streamed."""

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

from ckdist.config.samplers import SAMPLERS
from ckdist.engine.sampling_params import PARAMETERS, SamplingParams
from ckdist.serve.answer import event_in_turns
from ckdist.serve.answer_choice import Piece
from ckdist.serve.encoding import each
from ckdist.serve.openai_answer import Source
from ckdist.serve.requests.sampling_fields import LLAMA_RANDOM_SEED, for_choice
from ckdist.serve.run import Run
from ckdist.serve.scores import TokenScore, with_top
from ckdist.tokens.vocabulary import Vocabulary

STOP_TYPES = {"length": "limit"}


class LlamaCompletionAnswer:
    """One answer while it is generated.

    Choices are numbered as in /v1/completions. If there are several, the answer is a list.
    """

    def __init__(self, run: Run, tokenizer: Vocabulary, source: Source):
        self.run, self.tokenizer, self.work, self.source = run, tokenizer, run.work, source

    async def whole(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Returns the answer, or a list with one answer per choice."""
        answers = []
        for piece in await self.run.whole():
            tokens = piece.tokens if self.work.token_ids else []
            answers.append(self._final(piece, piece.text, tokens, len(piece.tokens), "\n" in piece.text))
        return answers[0] if len(answers) == 1 else answers

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yields pieces as server-sent events. The last one of a choice has no text, but all other fields."""
        tokens: Counter[int] = Counter()
        lines: set[int] = set()
        with self.run as run:
            while pieces := await run.next():
                parts = []
                for piece in pieces:
                    tokens[piece.choice] += len(piece.tokens)
                    lines |= {piece.choice} if "\n" in piece.text else set()
                    if piece.text or piece.tokens:
                        parts.append(self._partial(piece, tokens[piece.choice]))
                    if piece.finish_reason is not None:
                        scoreless = Piece(piece.choice, "", [], piece.finish_reason, piece.stop_reason)
                        count, has_line = tokens[piece.choice], piece.choice in lines
                        parts.append(self._final(scoreless, "", [], count, has_line))
                yield b"".join([await event_in_turns(part) for part in parts])

    def _partial(self, piece: Piece, count: int) -> dict[str, Any]:
        timings = {"timings": self.run.timings()} if self.work.timings_per_token else {}
        return {
            "index": piece.choice,
            "content": piece.text,
            "tokens": piece.tokens,
            "stop": False,
            "id_slot": max(self.work.slot, piece.choice),
            "tokens_predicted": count,
            "tokens_evaluated": self.work.prompt_length(piece.choice),
            **self._probabilities(piece.scores),
            **timings,
        }

    def _final(self, piece: Piece, text: str, tokens: list[int], count: int, has_line: bool) -> dict[str, Any]:
        work, prompt = self.work, piece.choice // self.work.n
        sampling, reason = for_choice(work.sampling, piece.choice % work.n), piece.stop_reason
        settings = llama_settings(sampling, work.max_tokens[prompt], work.stops, work.stream)
        whole = {
            "index": piece.choice,
            "content": text,
            "tokens": tokens,
            "id_slot": max(self.work.slot, piece.choice),
            "stop": True,
            "model": self.source.model,
            "tokens_predicted": count,
            "tokens_evaluated": work.prompt_length(piece.choice),
            "generation_settings": settings,
            "prompt": work.texts[prompt],
            "has_new_line": has_line,
            "truncated": False,
            "stop_type": STOP_TYPES.get(piece.finish_reason or "") or ("eos" if reason is None else "word"),
            "stopping_word": self.tokenizer.token_text(reason) if isinstance(reason, int) else reason or "",
            "tokens_cached": self.run.cached_tokens[prompt],
            **self._probabilities(piece.scores),
            "timings": self.run.timings(),
        }
        return chosen(whole, work.response_fields) if work.response_fields else whole

    def _probabilities(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        if not self.work.logprobs or not scores:
            return {}
        return {"completion_probabilities": each(partial(with_top, self._entry), scores)}

    def _entry(self, token: int, logprob: float | None) -> dict[str, Any]:
        piece = self.tokenizer.token_bytes(token)
        text = piece.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(piece), "logprob": logprob}


def llama_settings(
    sampling: SamplingParams, max_tokens: int, stops: tuple[str, ...] = (), stream: bool = False
) -> dict[str, Any]:
    """Returns the settings of an answer under llama-server's names. `max_tokens` -1: no limit but the context."""
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


def chosen(answer: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """Returns the parts of `answer` at `paths`, each under the last name of its path. Unknown paths are left out."""
    found = {}
    for path in paths:
        part: Any = answer
        names = path.split("/")
        for name in names:
            part = part.get(name) if isinstance(part, dict) else None
        if part is not None:
            found[names[-1]] = part
    return found
