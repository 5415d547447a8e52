"""From a grammar's text to what follows it token by token, for one vocabulary."""

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from ckdist.errors import RequestError
from ckdist.tokens.grammar import limits
from ckdist.tokens.tokenizer import Tokenizer


class _Wrapper(TokenizerWrapper):
    """A tokenizer as llguidance asks it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        # The class's own __init__ takes other libraries' tokenizers apart.
        self.is_tokenizer_wrapper = True
        self.eos_token_id = min(tokenizer.eos_token_ids)
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = list(tokenizer.pieces)[:vocab_size]
        self.special_token_ids = [token for token in sorted(tokenizer.special_ids) if token < vocab_size]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        """The ids of a text, control tokens not parsed."""
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


class GrammarCompiler:
    """Makes matchers of one vocabulary."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """Reads the vocabulary, of which `vocab_size` tokens are the model's."""
        wrapper = _Wrapper(tokenizer, vocab_size)
        eos = [token for token in sorted(tokenizer.eos_token_ids) if token < vocab_size]
        self._vocabulary = LLTokenizer(wrapper, eos_token=eos)
        wrapper(" {")  # what the tokenizer makes at its first use

    def compile(self, grammar: str) -> LLMatcher:
        """The grammar at its beginning. RequestError where llguidance refuses it."""
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=limits())
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())[:300]
            raise RequestError(f"grammar is not one that can be followed: {why}", "grammar", "invalid_grammar")
        return matcher
