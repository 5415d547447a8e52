# ruff: noqa: RUF001 - this file is about the characters of many scripts
r"""How byte-level BPE vocabularies split a text before they merge, by GGUF's names under `tokenizer.ggml.pre`.

The model makers publish these patterns in their tokenizer.json. Each pattern is applied to the pieces that the one
before it left. Text that no pattern matches stays a piece of its own.
"""

import difflib
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from ckdist.errors import ModelFileError

NAMING = (
    "name the model's own with --override-kv tokenizer.ggml.pre=str:NAME; "
    "names are those of llama.cpp, as llama-bpe for Llama 3, qwen2 for Qwen 2 to 3, "
    "tekken for Mistral Nemo, smollm, gpt-2, falcon"
)

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Words with one character before them, punctuation with its newlines, runs of newlines, runs of spaces but the last.
WORDS, SPACES = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\s+(?!\S)|\s+"
TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}"
# Words that change case inside, as CamelCase does.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CAMEL_1, CAMEL_2 = rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
CAMEL = f"{CAMEL_1}{CONTRACTIONS}?|{CAMEL_2}{CONTRACTIONS}?"
CAMEL_TAIL = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{SPACES}"
CJK = "[一-龥぀-ゟ゠-ヿ]+"
# DeepSeek's words, with the characters of ASCII that may stand before them, and its punctuation.
DEEPSEEK_WORDS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK_TAIL = rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{SPACES}"
LINES = r"[^\n]+|[\n]+"


@dataclass(frozen=True)
class Split:
    """One published way to split. `adds_bos` and `whole_words` are the makers' defaults."""

    patterns: tuple[str, ...]
    adds_bos: bool = False
    whole_words: bool = False  # a word that is a token is not merged
    composes: bool = False  # Unicode NFC first
    visible_space: bool = False  # tokens are text with ▁ for spaces and <0x0A> for bytes, not the byte-level alphabet
    mask: str = ""  # the special token that takes the spaces before it

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The pre-tokenizer of the `tokenizers` library with these patterns."""
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        if not self.visible_space:
            steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps)

    def normalizer(self) -> normalizers.Normalizer | None:
        """The normalizer to apply before splitting, or None."""
        return normalizers.NFC() if self.composes else None


DEFAULT = Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"))
GPT2 = Split((GPT2_WORDS,))
GPT2_COMPOSED = Split(GPT2.patterns, composes=True)
DIGITS = Split((r"\p{N}", GPT2_WORDS))
LLAMA3 = Split((f"{CONTRACTIONS}|{WORDS}|\\p{{N}}{{1,3}}|{TAIL}",), adds_bos=True, whole_words=True)
THREE_DIGITS = Split(LLAMA3.patterns)
QWEN2 = Split((f"{CONTRACTIONS}|{WORDS}|\\p{{N}}|{TAIL}",), composes=True)
ONE_DIGIT = Split(QWEN2.patterns)
QWEN35 = Split(
    (
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{SPACES}"
        ),
    ),
    composes=True,
)
TEKKEN = Split((f"{CAMEL_1}|{CAMEL_2}|\\p{{N}}|{CAMEL_TAIL}",), adds_bos=True, whole_words=True)
GPT4O = Split((f"{CAMEL}|\\p{{N}}{{1,3}}|{CAMEL_TAIL}",))
FALCON = Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2_WORDS, r"[0-9][0-9][0-9]"))
DEEPSEEK_CODER = Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"))
DEEPSEEK_LLM = Split(
    (
        r"[\r\n]",
        (
            r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-"
            r"ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\x{1F7D}ᾀ-ᾴᾶ-ᾼ\x{1FBE}ῂ-ῄῆ-ῌῐ-\x{1FD3}ῖ-\x{1FDB}ῠ-Ῥῲ-ῴῶ-ῼ"
            r"ℂℇℊ-ℓℕℙ-ℝℤ\x{2126}ℨ\x{212A}-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗ"
            r"Ａ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
        ),
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}+",
    )
)
DEEPSEEK3 = Split((r"\p{N}{1,3}", CJK, DEEPSEEK_WORDS + DEEPSEEK_TAIL))
SPARK = Split((*DEEPSEEK3.patterns[:2], rf"{DEEPSEEK_WORDS}| ?[\p{{P}}\p{{S}}]+|[\r\n]|{SPACES}", r"\p{N}"))
# Three makers group digits by three from the right. Their patterns, and llama.cpp's for afmoe, take quadratic time in
# the length of a number. These equivalent ones take linear time.
AFMOE = Split(
    (
        r"\p{N}+",
        r"(?:\p{N}{3})+(?!\p{N})",
        r"\p{N}{3}",
        r"[一-鿿㐀-䶿\x{F900}-\x{FAFF}぀-ゟ゠-ヿ･-ﾟ⼀-⿟เ-๿຀-໿ក-៿က-႟ꩠ-ꩿꧠ-꧿가-힯ᄀ-ᇿ]+",
        DEEPSEEK_WORDS + DEEPSEEK_TAIL,
    )
)
YOUTU = Split(
    (f"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|{CJK}", f"{CAMEL}|\\p{{N}}|{CAMEL_TAIL}"), whole_words=True
)
JAIS2 = Split(
    (
        rf"{CONTRACTIONS}|{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
        + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
        + r"|\s{1}",
    )
)
BLOOM = Split((" ?[^(\\s|.,!?…。，、।۔،)]+",))
VIKING = Split((*BLOOM.patterns, r"\p{N}"))
CHAMELEON = Split(
    (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        GPT2_WORDS,
    ),
    adds_bos=True,
)
# Published as \d{1,3}(?=(?:\d{3})*\b).
TINY_AYA = Split((r"(?<!\d)(?>\d+)\b", r"(?<!\d{3})(?:\d{3})+(?![\s\S])", r"\G\d{3}", *GPT4O.patterns), composes=True)
# letters that are not Chinese characters
_HAN_UPPER, _HAN_LOWER = (rf"[{letters}&&[^\p{{Han}}]]" for letters in (UPPER, LOWER))
KIMI = Split(
    (
        (
            rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}*{_HAN_LOWER}+{CONTRACTIONS}?"
            rf"|[^\r\n\p{{L}}\p{{N}}]?{_HAN_UPPER}+{_HAN_LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}|{TAIL}"
        ),
    )
)
# Published as \p{N}+ and then (?=(\d{3})+(?!\d)).
SUPERBPE = Split((r"\p{N}+", r"(?:\d{3})+(?!\d)(?:(?:(?!\d)\p{N})+\d{0,2}(?=(?:\d{3})*(?!\d)))*", r"\d{3}(?=\d{3})"))
BAILING = Split((rf"'(?i:[sdmt]|ll|ve|re)|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]|{SPACES}",))
SEED_CODER = Split((rf"{CONTRACTIONS}|{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{SPACES}",))
EXAONE_MOE = Split(
    (
        (
            rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]|{SPACES}"
        ),
    )
)
MINICPM5 = Split((r"\p{N}{1,3}", rf"{CONTRACTIONS}|{WORDS}|\p{{N}}+|{TAIL}"), whole_words=True)
LAGUNA = Split((LINES, *ONE_DIGIT.patterns))
GEMMA4 = Split((LINES,), adds_bos=True, visible_space=True)

NAMES = (
    (DEFAULT, "default"),
    (GPT2, "gpt-2 phi-2 jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum"),
    (GPT2, "jina-es jina-de jina-v1-en roberta-bpe"),
    (Split(GPT2.patterns, mask="<mask>"), "jina-v2-es jina-v2-de jina-v2-code"),
    (GPT2_COMPOSED, "mpt olmo"),
    (Split(GPT2.patterns, composes=True, mask="[MASK]"), "modern-bert"),
    (DIGITS, "smollm starcoder refact codeshell exaone minerva-7b mellum2"),
    (Split(DIGITS.patterns, composes=True), "command-r"),
    (LLAMA3, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (THREE_DIGITS, "dbrx smaug-bpe chatglm-bpe"),
    (Split(LLAMA3.patterns, whole_words=True), "glm4 glm5"),
    (QWEN2, "qwen2 f2llmv2"),
    (ONE_DIGIT, "deepseek-r1-qwen megrez stablelm2 hunyuan kormo solar-open grok-2"),
    (QWEN35, "qwen35"),
    (TEKKEN, "tekken"),
    (GPT4O, "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (Split(GPT4O.patterns, whole_words=True), "granite-embed-multi-97m"),
    (FALCON, "falcon"),
    (DEEPSEEK_LLM, "deepseek-llm"),
    (DEEPSEEK_CODER, "deepseek-coder"),
    (DEEPSEEK3, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    (SPARK, "spark2_5"),
    (YOUTU, "youtu"),
    (JAIS2, "jais-2"),
    (BLOOM, "bloom gpt3-finnish poro-chat"),
    (VIKING, "viking"),
    (CHAMELEON, "chameleon"),
    (TINY_AYA, "tiny_aya cohere2moe"),
    (KIMI, "kimi-k2"),
    (SUPERBPE, "superbpe"),
    (BAILING, "bailingmoe bailingmoe2 llada-moe"),
    (SEED_CODER, "seed-coder"),
    (EXAONE_MOE, "exaone-moe"),
    (MINICPM5, "minicpm5"),
    (Split((f"{WORDS}|\\p{{N}}|{TAIL}",)), "ufakzeka"),
    (AFMOE, "afmoe"),
    (LAGUNA, "laguna"),
    (GEMMA4, "gemma4 granite-embed-multi-311m"),
    (Split((LINES,), visible_space=True), "sarvam-moe"),
)
SPLITS = {name: split for split, names in NAMES for name in names.split()}


def split_named(name: str) -> Split:
    """Returns the split called `name`. Raises ModelFileError if `name` is empty or not known."""
    if name in SPLITS:
        return SPLITS[name]
    if not name:
        raise ModelFileError(
            f"tokenizer.ggml.pre is missing, so how text is split before it is merged is not known; {NAMING}"
        )
    near = difflib.get_close_matches(name, SPLITS, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    raise ModelFileError(
        f"tokenizer.ggml.pre {name!r:.60} is not known{guess}; if the model splits text as another does, {NAMING}"
    )
