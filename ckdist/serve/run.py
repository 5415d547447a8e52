"""One HTTP request's work on the engine, from the first submit to the last piece of the last choice."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from ckdist.engine.messages import TOKEN_BYTES, Submit, Tokens, unpack_tokens
from ckdist.engine.prefix_use import CacheUse
from ckdist.serve.accounts import Account
from ckdist.serve.answer_choice import Choice, Growth, Piece
from ckdist.serve.encoding import Turns
from ckdist.serve.engine_client import EngineClient, new_id
from ckdist.serve.metrics import Metrics
from ckdist.serve.problems import Problem
from ckdist.serve.requests.sampling_fields import for_choice
from ckdist.serve.scores import score_prompt
from ckdist.serve.text_records import Prepared
from ckdist.tokens.vocabulary import Vocabulary


class Run:
    """The sequences of one request. Entering the `with` block submits them; leaving it aborts the unfinished ones."""

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Vocabulary,
        metrics: Metrics,
        work: Prepared,
        max_sequences: int,
        account: Account,
    ):
        self.work, self.max_sequences, self._account = work, max_sequences, account
        self._client, self._tokenizer, self._metrics = client, tokenizer, metrics
        self._generation = client.generation(account)
        self._choices: dict[int, Choice] = {}  # unfinished choices
        self.on_first: Callable[[list[int]], None] | None = None  # gets the tokens of the first choice at its end
        self._first: list[int] = []
        self._heard: set[int] = set()
        self._unseen: dict[int, Growth] = {}  # pieces with tokens but no text yet, as of half a character
        self._heard_at: dict[int, float] = {}  # time of the last tokens of each choice
        self._finish_reasons: dict[str, None] = {}
        self._completion_tokens = 0
        self._prompt_tokens = 0
        self.cached_tokens = [0] * len(work.prompts)  # per prompt: tokens found in the prefix cache
        self._cached_from = 0  # tokens of the sequences that left these in the cache
        self._cache_uses: list[CacheUse] = []  # of the prompts that have begun
        self._begun_at = self._first_at = self._last_at = time.monotonic()

    @property
    def complete(self) -> bool:
        """True if all choices are complete."""
        return bool(self._heard) and not self._choices

    @property
    def progress_at(self) -> float:
        """The time of the last tokens, in seconds of time.monotonic."""
        return self._generation.progress_at

    def __enter__(self) -> "Run":
        work = self.work
        count = len(work.prompts) * work.n
        self._account.check_places(count, self.max_sequences, self._client.active)
        self._account.check_sequences(count)
        self._account.take_tokens(sum(len(prompt) for prompt in work.prompts) // TOKEN_BYTES)
        tenant, place = self._account.tenant(work.cache_salt, work.cache_prompt), self._account.place(work.place)
        try:
            for number in range(count):
                prompt = number // work.n
                room, sampling = work.max_tokens[prompt], for_choice(work.sampling, number % work.n)
                sampling = dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
                message = Submit(new_id(), work.prompts[prompt], sampling, tenant, place, adapters=work.adapters)
                self._generation.submit(number, message)
                self._choices[number] = Choice(number, self._tokenizer, work)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._generation.__exit__()
        metrics = self._metrics
        if self._choices:
            metrics.aborts.inc()
            metrics.finished.labels("abort").inc(len(self._choices))
        if not self._heard:
            return
        metrics.generation_seconds.observe(self._last_at - self._begun_at)
        metrics.decode_seconds.observe(self._last_at - self._first_at)
        metrics.request_prompt_tokens.observe(self._prompt_tokens)
        metrics.request_generated_tokens.observe(self._completion_tokens)
        steps = self._completion_tokens / len(self._heard) - 1  # after the first token, in each choice
        if steps > 0:
            metrics.token_seconds.observe((self._last_at - self._first_at) / steps)

    async def next(self) -> list[Piece]:
        """Waits for output. Returns at most one piece per choice, or an empty list if all choices are complete."""
        shown: dict[int, None] = {}
        turns = Turns()
        while self._choices and not shown:
            for number, message in await self._generation.next():
                choice = self._choices.get(number)
                if choice is None:
                    continue  # a stop string has ended it within this batch
                assert isinstance(message, Tokens), "only `embed` asks for vectors"
                piece = await self._grow(choice, message)
                self._unseen.setdefault(number, Growth()).add(piece)
                if piece.text or piece.scores or piece.finish_reason is not None or self.work.token_ids:
                    shown[number] = None
                await turns.end()
        return [self._unseen.pop(number).piece() for number in shown]

    async def whole(self) -> list[Piece]:
        """Enters the run, and returns every complete choice as one piece, in order."""
        grown = [Growth() for _ in range(len(self.work.prompts) * self.work.n)]
        with self:
            while pieces := await self.next():
                for piece in pieces:
                    grown[piece.choice].add(piece)
        return [growth.piece() for growth in grown]

    def usage(self) -> dict[str, Any]:
        """Returns OpenAI's usage object for the tokens so far."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens)},
        }

    def log_fields(self) -> dict[str, int | float | str]:
        """Token counts and speeds for the request's log line.

        `sim` is the share of the prompt that was cached. `f_keep` is the share of the earlier sequence, which left
        the cached tokens, that this request reuses. Cached tokens were matched in memory or loaded from disk, and
        `cache_end` says why there were no more of them.
        """
        cached = sum(self.cached_tokens)
        fields: dict[str, int | float | str] = {"prompt_tokens": self._prompt_tokens, "cached_tokens": cached}
        if not self._heard:
            return fields
        seconds = self._last_at - self._first_at
        uses = self._cache_uses
        loaded = {
            "loaded_tokens": sum(use.loaded for use in uses),
            "loaded_bytes": sum(use.loaded_bytes for use in uses),
            "load_ms": round(1000 * sum(use.load_seconds for use in uses), 1),
        }
        used = {
            "matched_tokens": sum(use.matched for use in uses),
            **(loaded if loaded["loaded_tokens"] else {}),
            "computed_tokens": self._prompt_tokens - cached,
            "cache_end": ",".join(dict.fromkeys(use.end for use in uses)),
        }
        return fields | {
            **(used if uses else {}),
            "sim": round(cached / max(1, self._prompt_tokens), 3),
            "f_keep": round(cached / max(1, self._cached_from), 3),
            "generated_tokens": self._completion_tokens,
            "finish": ",".join(self._finish_reasons) or "aborted",
            "first_token_seconds": round(self._first_at - self._begun_at, 4),
            "tokens_per_second": round((self._completion_tokens - len(self._heard)) / seconds, 2) if seconds else 0.0,
        }

    def moments(self) -> tuple[float, ...]:
        """The times of the submission, of the first token and of the last one. Empty if there is no token."""
        return (self._begun_at, self._first_at, self._last_at) if self._heard else ()

    def timings(self) -> dict[str, Any]:
        """Returns llama-server's `timings` object for the tokens so far. Those of the prompt include waiting."""
        prompt_seconds, seconds = self._first_at - self._begun_at, self._last_at - self._first_at
        cached = sum(self.cached_tokens)
        return {
            "cache_n": cached,
            **_speed("prompt", max(0, self._prompt_tokens - cached), prompt_seconds),
            **_speed("predicted", self._completion_tokens, seconds),
        }

    async def _grow(self, choice: Choice, message: Tokens) -> Piece:
        before = choice.tokens
        piece = choice.take(message)
        self._count(choice.number, choice.tokens - before, message)
        if choice.finish_reason == "abort":
            raise Problem(503, "the engine ended the request early; try again")
        if choice.number not in self._heard:
            self._heard.add(choice.number)
            await self._prepend_prompt(piece, message)
        if self.on_first is not None and choice.number == 0:
            self._first += piece.tokens
            if choice.finish_reason is not None:
                self.on_first(self._first)
        if choice.finish_reason is not None:
            del self._choices[choice.number]
            self._finish_reasons[choice.finish_reason] = None
            self._metrics.finished.labels(choice.finish_reason).inc()
            self._generation.abort(choice.number)  # has an effect only if a stop string ended it
        return piece

    async def _prepend_prompt(self, piece: Piece, message: Tokens) -> None:
        if not self.work.echo:
            return
        prompt = piece.choice // self.work.n
        text = self.work.texts[prompt]
        piece.text = text + piece.text
        if message.prompt_logprobs is not None:
            tokens, scores = unpack_tokens(self.work.prompts[prompt]), message.prompt_logprobs
            piece.scores = await score_prompt(self._tokenizer.decoder(), tokens, scores, len(text), list(piece.scores))

    def _count(self, number: int, tokens: int, message: Tokens) -> None:
        self._last_at = time.monotonic()
        self._completion_tokens += tokens
        self._account.count_tokens(tokens)
        self._metrics.generated_tokens.inc(tokens)
        if tokens:
            if number in self._heard_at:
                self._metrics.inter_token_seconds.observe((self._last_at - self._heard_at[number]) / tokens)
            self._heard_at[number] = self._last_at
        if number in self._heard:
            return
        if not self._heard:
            self._first_at = self._last_at
            self._metrics.first_token_seconds.observe(self._first_at - self._begun_at)
        if number % self.work.n == 0:
            self._prompt_tokens += message.prompt_tokens
            self.cached_tokens[number // self.work.n] = message.cached_tokens
            self._cached_from += message.cached_from
            if message.cache_use is not None:
                self._cache_uses.append(message.cache_use)
            self._metrics.prompt_tokens.inc(message.prompt_tokens)
            self._metrics.cached_tokens.inc(message.cached_tokens)


def _speed(name: str, tokens: int, seconds: float) -> dict[str, float]:
    return {
        f"{name}_n": tokens,
        f"{name}_ms": seconds * 1e3,
        f"{name}_per_token_ms": seconds * 1e3 / tokens if tokens else 0.0,
        f"{name}_per_second": tokens / seconds if seconds > 0 else 0.0,
    }
