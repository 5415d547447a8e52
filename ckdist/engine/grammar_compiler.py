"""Compiles a grammar's text into a matcher of tokens, for one vocabulary."""

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ckdist.errors import RequestError
from ckdist.tokens.grammar_limits import limits
from ckdist.tokens.tokenizer import Tokenizer


class _Wrapper(TokenizerWrapper):
    """Adapts a tokenizer to llguidance."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        # The base class's __init__ inspects tokenizers of other libraries, so it is not called.
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = list(tokenizer.pieces)[:vocab_size]
        self.special_token_ids = [token for token in sorted(tokenizer.special_ids) if token < vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


class GrammarCompiler:
    """Compiles grammars for one vocabulary.

    Args:
        tokenizer: Its vocabulary is read here.
        vocab_size: Tokens of the vocabulary that the model has.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        wrapper = _Wrapper(tokenizer, vocab_size)
        eos = [token for token in sorted(tokenizer.eos_token_ids) if token < vocab_size]
        self._vocabulary = LLTokenizer(wrapper, eos_token=eos)
        wrapper(" {")  # the first use of a tokenizer is slow

    def compile(self, grammar: str) -> LLMatcher:
        """Returns a matcher at the beginning of the grammar. Raises RequestError if llguidance refuses it."""
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:300]
            raise RequestError(f"grammar cannot be followed: {why}", "grammar", "invalid_grammar")
        return matcher
