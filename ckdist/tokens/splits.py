r"""How byte-level BPE vocabularies split a text before they merge, by the names that GGUF gives under `tokenizer.ggml.pre`.

The patterns are those that the model makers publish in their tokenizer.json; each is applied to the pieces that the one before it
left. What no pattern matches stays a piece of its own.
"""

import logging
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

log = logging.getLogger(__name__)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Words with one character before them, punctuation with its newlines, runs of newlines, runs of spaces but the last.
WORDS, TAIL = r"[^\r\n\p{L}\p{N}]?\p{L}+", r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Words that change case inside, as CamelCase does.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAMEL_1, CAMEL_2 = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
CAMEL_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class Split:
    """One published way to split. `adds_bos` and `whole_words` (a word that is a token is not merged) are the makers' defaults."""

    patterns: tuple[str, ...]
    adds_bos: bool = False
    whole_words: bool = False
    composes: bool = False  # Unicode NFC first

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.composes else None


DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))
GPT2 = Split((GPT2_WORDS,))
DIGITS = Split((r"\p{N}", GPT2_WORDS))
LLAMA3 = Split((f"{CONTRACTIONS}|{WORDS}|\\p{{N}}{{1,3}}|{TAIL}",), adds_bos=True, whole_words=True)
THREE_DIGITS = Split(LLAMA3.patterns)
QWEN2 = Split((f"{CONTRACTIONS}|{WORDS}|\\p{{N}}|{TAIL}",), composes=True)
ONE_DIGIT = Split(QWEN2.patterns)
QWEN35 = Split(
    (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",), composes=True
)
TEKKEN = Split((f"{CAMEL_1}|{CAMEL_2}|\\p{{N}}|{CAMEL_TAIL}",), adds_bos=True, whole_words=True)
GPT4O = Split((f"{CAMEL_1}{CONTRACTIONS}?|{CAMEL_2}{CONTRACTIONS}?|\\p{{N}}{{1,3}}|{CAMEL_TAIL}",))
FALCON = Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]"))
DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
DEEPSEEK3 = Split(
    (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
    )
)

SPLITS = {
    "default": DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), THREE_DIGITS),
    "qwen2": QWEN2,
    **dict.fromkeys(("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"), ONE_DIGIT),
    "qwen35": QWEN35,
    "tekken": TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4"), GPT4O),
    "falcon": FALCON,
    "deepseek-coder": DEEPSEEK_CODER,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), DEEPSEEK3),
}


def split_named(name: str) -> Split:
    """The way to split called `name`; an unknown one is `default` with a warning, since most texts split alike."""
    if name not in SPLITS:
        log.warning("pre-tokenizer %r is not known, using 'default': rare texts may be split differently; known: %s", name, ", ".join(SPLITS))
    return SPLITS.get(name, DEFAULT)
