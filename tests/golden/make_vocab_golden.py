"""Makes tests/golden/vocab: ids of awkward texts by other engines, for every pre-tokenizer name, over small synthetic
vocabularies.

    pip install llama-cpp-python==0.3.36 gguf tokenizers regex && python tests/golden/make_vocab_golden.py

The vocabularies are trained on the texts without splitting words, so that their tokens reach over words, spaces, digits
and lines: where two ways to split differ, the ids do. `vocab.json` holds the texts and the vocabularies, `ids.npz` for
each way to split the ids of all texts, one after the other, and how many each text has (-1: left out).

The ids are those of the makers' published patterns by another engine, Python's `regex`, and a plain BPE. llama.cpp
0.3.36 gives the same but for the texts that this prints: it does not normalise to NFC (mpt, modern-bert, command-r,
qwen2, qwen35, tiny_aya), knows no combining marks (tekken, gpt-4o, kimi-k2) or no case (youtu, tiny_aya, kimi-k2) in
words that change case inside, groups digits that letters follow (tiny_aya), and no digits but ASCII's (superbpe).
BERT's ids are llama.cpp's, without the texts that it takes apart in another way than BERT.
"""

import json
import sys
import tempfile
import unicodedata
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import regex
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from ckdist.tokens.pieces import BYTE_ALPHABET  # noqa: E402
from ckdist.tokens.splits import SPLITS, Split  # noqa: E402

OUT = Path(__file__).parent / "vocab"
REAL = Path(__file__).parent / "real"
NUMBERS = [" ".join("123456789012"[:n] for n in range(1, 13)), "1234567abc 12345 abc1234 x12 1,234,567.89 ½ ² ٣٤٥٦ 0x1F600"]
TEXTS = [
    *NUMBERS,
    "1000² 12345½678 1234567½ ½123 ²²² x1234 1234x 1234567_ ٣٤٥٦٧٨٩ " + "7" * 20,
    "你好，世界！中文分词测试。日本語のテスト、カタカナとひらがな。漢字かな交じり文123",
    "한국어 문장을 시험합니다. 자모 ㄱㄴㄷ 각 가각",
    "ภาษาไทยไม่มีช่องว่าง ທົດສອບ မြန်မာ ភាសាខ្មែរ",
    "हिन्दी में परीक्षण। বাংলা ভাষা తెలుగు العربية والأرقام ١٢٣، עברית",
    "e\u0301 re\u0301sume\u0301 a\u0300a\u0300 Vie\u0302\u0323t n\u0303 \u0301x",
    "naïve café Ünïcödé straße ÀÉÎ ŁÓDŹ Привет, МИР! Ελληνικά ΑΒΓ ǅ ʰ",
    "👩‍👩‍👧‍👦 😀🎉 🇫🇷🇩🇪 ☎️ 1️⃣ ✊🏽",
    "camelCase CamelCaseWords HTTPServer parseXMLDocument iPhone eBay snake_case_words kebab-case-words",
    "I'm I'M you're YOU'RE we've WE'VE he'll HE'LL I'd I'D don't DON'T it's IT'S 's 'S 'tis o'clock",
    "a  b   c    d     e      f\ttab\t\ttwo \t mixed",
    "\n\n\nlines\n\n with\n   spaces \n\t\n and\r\n\r\nreturns\r end \n",
    "trailing   ",
    "   leading",
    " " * 40 + "x" + " " * 9,
    "def f(x, y=2):\n    if x >= y and x != 3:\n        return {'a': [x**2, y // 3]}  # note\n    return None\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; } // ok\n\n\t/* a */",
    "https://example.org/a/b?c=1&d=%20#frag user@example.com C:\\dir\\file.txt",
    "!!! ??? ... --- *** ___ ### <<>> <= >= == != && || :: -> => /* */ // \\\\ `code` ~x^y|z $5.00 €10 £3",
    "“quotes” ‘single’ «guillemets» 【brackets】 （全角） ！？：；、。 — – … ％＋＝",
    "nbsp\u00a0here ideographic\u3000space thin\u2009space line\u2028sep next\u0085line zero\u200bwidth",
    "a.b,c;d:e!f?g(h)i[j]k{l}m<n>o/p\\q|r",
    "x=1;y=22;z=333;w=4444 (a+b)==c a-b a/b [1] {2}",
    "word.\n\nNew paragraph!\nNext line?\n- item 1\n- item 2\n\n1. first\n2. second\n",
    "IMGIMGABCZ <sentinel:12> IMGIMGZ",
    "ﬁ ﬂ Ω Å K ™ ℃ № Ⅳ ⅷ ① ㊀ ｶﾅ Ｆｕｌｌ",
    "\u0000\u0001\u001b[31mred\u001b[0m\u007f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ㄅㄆㄇ、︰ 한ㅎ！？ㄱ…“”",
    "'lltest 'RE're a'b 'x' d'accord l'été aujourd'hui",
    "A1b2C3 4K 8K UTF-8 x86_64 v1.2.3-rc4 2024-01-31T12:34:56Z",
    " .  ,  ;a .b ..c  'd  \"e\" \n.f \n\n,g",
]  # fmt: skip


@llama_cpp.llama_log_callback
def quiet(level, text, data):
    pass


def main() -> None:
    OUT.mkdir(exist_ok=True)
    llama_cpp.llama_log_set(quiet, None)
    texts = list(dict.fromkeys([*TEXTS, *(case["text"] for case in json.loads((REAL / "smollm2.tokens.json").read_text()))]))
    byte_level, visible, words = train(texts, True), train(texts, False), train_words(texts)
    arrays = {}
    for split in dict.fromkeys(SPLITS.values()):
        names = [name for name, value in SPLITS.items() if value == split]
        tokens, merges = visible if split.visible_space else byte_level
        by_llama = [llama_ids("gpt2", name, tokens, merges, texts) for name in names]
        assert all(ids == by_llama[0] for ids in by_llama), names
        by_regex = [regex_ids(split, tokens, merges, text) for text in texts]
        departs = [i for i, (a, b) in enumerate(zip(by_llama[0], by_regex)) if a != b]
        print(f"{names[0]}: {len(texts) - len(departs)} of {len(texts)} alike")
        for i in departs:
            first = next((k for k, (a, b) in enumerate(zip(by_llama[0][i], by_regex[i])) if a != b), 0)
            shown = [[tokens[k] for k in ids[i][first : first + 5]] for ids in (by_llama[0], by_regex)]
            print(f"    {ascii(texts[i])[:70]}: llama.cpp {shown[0]}, the pattern {shown[1]}")
        # What is a word before \b, `regex` and the tokenizers library see differently for digits like these.
        arrays |= packed(names[0], [None if r"\b" in split.patterns[0] and set("½²") & set(text) else ids for text, ids in zip(texts, by_regex)])
    assert llama_ids("gemma4", "", *visible, texts) == llama_ids("gpt2", "gemma4", *visible, texts)
    arrays |= packed("bert", [None if uncertain(text) else ids for text, ids in zip(texts, llama_ids("bert", "", words, [], texts))])
    np.savez_compressed(OUT / "ids.npz", **arrays)
    vocabularies = {"byte_level": byte_level, "visible_space": visible, "words": (words, [])}
    (OUT / "vocab.json").write_text(json.dumps({"texts": texts, **vocabularies}, ensure_ascii=True) + "\n", encoding="utf-8")


def packed(name: str, ids: list[list[int] | None]) -> dict[str, np.ndarray]:
    flat = np.array([i for text in ids for i in text or []], np.uint16)
    return {name: flat, f"{name}.counts": np.array([-1 if text is None else len(text) for text in ids], np.int16)}


def uncertain(text: str) -> bool:
    """Texts with marks or Hangul, that llama.cpp does not take apart as BERT does, and with control characters."""
    return any(unicodedata.category(c) in ("Mn", "Mc", "Me", "Cc", "Cf") and c not in "\t\n\r" or "\u1100" <= c <= "\u11ff" for c in unicodedata.normalize("NFD", text))


def train(texts: list[str], byte_level: bool) -> tuple[list[str], list[str]]:
    """Tokens and merges of up to 7 characters, of the byte-level alphabet or of text with ▁ for spaces and tokens
    for bytes.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    numbers = " ".join(str(n) for n in range(0, 4000, 7))
    alphabet, extra = [], [f"<0x{byte:02X}>" for byte in range(256)]
    if byte_level:
        alphabet, extra = pre_tokenizers.ByteLevel.alphabet(), []
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[^\n]+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=2000, min_frequency=2, max_token_length=7, initial_alphabet=alphabet, special_tokens=extra, show_progress=False
    )
    texts = [text for text in texts if "\0" not in text]  # GGUF's readers end a token there
    backend.train_from_iterator([*texts * 2, numbers, Path(__file__).read_text(encoding="utf-8")], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def train_words(texts: list[str]) -> list[str]:
    """WordPiece's tokens, as GGUF writes them: ▁ before what begins a word."""
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    backend.train_from_iterator(texts * 2, trainers.WordPieceTrainer(vocab_size=900, special_tokens=special, show_progress=False))
    tokens = sorted(backend.get_vocab(), key=backend.get_vocab().get)
    return [t if t in special else t[2:] if t.startswith("##") else f"\u2581{t}" for t in tokens]


def regex_ids(split: Split, tokens: list[str], merges: list[str], text: str) -> list[int]:
    """The published patterns by `regex`, and merges in the order of their ranks."""
    text = unicodedata.normalize("NFC", text) if split.composes else text
    pieces = [text.replace(" ", "\u2581") if split.visible_space else text] if text else []
    for pattern in split.patterns:
        pattern = regex.sub(r"\\x\{([0-9A-F]+)\}", lambda code: chr(int(code[1], 16)), pattern)
        pieces = [part for piece in pieces for part in isolated(regex.compile(pattern, regex.V1), piece)]
    ids, rank = {token: i for i, token in enumerate(tokens)}, {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
    letters = {byte: letter for letter, byte in BYTE_ALPHABET.items()}
    found = []
    for piece in pieces:
        parts = list(piece) if split.visible_space else [letters[byte] for byte in piece.encode()]
        if split.whole_words and "".join(parts) in ids:
            parts = ["".join(parts)]
        while len(parts) > 1:
            best, at = min((rank.get(pair, 1 << 30), i) for i, pair in enumerate(zip(parts, parts[1:])))
            if best == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        for part in parts:
            found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def isolated(pattern, text: str) -> list[str]:
    parts, end = [], 0
    for match in pattern.finditer(text):
        parts += [text[end : match.start()], match[0]]
        end = match.end()
    return [part for part in [*parts, text[end:]] if part]


def llama_ids(kind: str, name: str, tokens: list[str], merges: list[str], texts: list[str]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key in ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count"):
            writer.add_uint32(f"llama.{key}", 1)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tokenizer_model(kind)
        if name:
            writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        types = [6 if token.startswith("<0x") else 3 if token.startswith("[") and kind == "bert" and len(token) > 3 else 1 for token in tokens]
        writer.add_token_types(types)
        if kind == "bert":
            for key, token in (("unknown", "[UNK]"), ("bos", "[CLS]"), ("seperator", "[SEP]"), ("padding", "[PAD]")):
                writer.add_uint32(f"tokenizer.ggml.{key}_token_id", tokens.index(token))
        else:
            writer.add_token_merges(merges)
        writer.add_bool("tokenizer.ggml.add_bos_token", False)
        for writes in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
            writes()
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        assert model, name
        ids = [tokenized(llama_cpp.llama_model_get_vocab(model), text.encode()) for text in texts]
        llama_cpp.llama_model_free(model)
        return ids


def tokenized(vocab, text: bytes) -> list[int]:
    out = (llama_cpp.llama_token * (len(text) + 8))()
    count = llama_cpp.llama_tokenize(vocab, text, len(text), out, len(out), False, False)
    assert count >= 0, text
    return list(out[:count])


if __name__ == "__main__":
    main()
