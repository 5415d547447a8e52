"""Makes tests/golden/vocab: ids by llama.cpp of awkward texts, for every pre-tokenizer name, over one small synthetic vocabulary.

    pip install llama-cpp-python==0.3.36 gguf tokenizers && python tests/golden/make_vocab_golden.py

The vocabulary is trained on the texts without splitting words, so that its tokens reach over words, spaces, digits and lines:
where two ways to split differ, the ids do. `vocab.json` holds the vocabulary and the texts, `ids.npz` for each way to split
the ids of all texts, one after the other, and how many each has. A text where llama.cpp is known to depart from the maker's
published pattern has none; `DEPARTS` says why.
"""

import json
import sys
import tempfile
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from ckdist.tokens.gguf import tokenizer_from_gguf  # noqa: E402
from ckdist.tokens.splits import SPLITS  # noqa: E402

OUT = Path(__file__).parent / "vocab"
REAL = Path(__file__).parent / "real"
NUMBERS = [" ".join("123456789012"[:n] for n in range(1, 13)), "1234567abc 12345 abc1234 x12 1,234,567.89 ½ ² ٣٤٥٦ 0x1F600"]
TEXTS = [
    *NUMBERS,
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
    tokens, merges = train(texts)
    (OUT / "vocab.json").write_text(json.dumps({"tokens": tokens, "merges": merges, "texts": texts}, ensure_ascii=False) + "\n", encoding="utf-8")
    arrays, departed = {}, {}
    for split in dict.fromkeys(SPLITS.values()):
        names = [name for name, value in SPLITS.items() if value == split]
        if split.visible_space:
            continue
        ours = tokenizer_from_gguf(metadata(tokens, merges, names[0]))
        by_name = [llama_ids(tokens, merges, name, texts) for name in names]
        assert all(ids == by_name[0] for ids in by_name), names
        for i, (text, ids) in enumerate(zip(texts, by_name[0])):
            got = ours.encode(text, add_special=False, parse_special=False)
            if got != ids:
                departed.setdefault(names[0], []).append((text, [tokens[j] for j in got], [tokens[j] for j in ids]))
        arrays[names[0]] = by_name[0]
    for name, cases in departed.items():
        print(name, len(cases))
        for text, got, ids in cases[:4]:
            print("   ", ascii(text)[:90])
            first = next((i for i, (a, b) in enumerate(zip(got, ids)) if a != b), 0)
            print("      ours", got[first : first + 6], "llama.cpp", ids[first : first + 6])


def train(texts: list[str]) -> tuple[list[str], list[str]]:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=2400, min_frequency=1, max_token_length=7, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    readme = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8") if (ROOT / "docs" / "serving.md").exists() else ""
    backend.train_from_iterator([*texts * 4, *(" ".join(str(n) for n in range(0, 4000, 7)) for _ in range(2)), readme[:6000]], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return tokens, [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]


def metadata(tokens: list[str], merges: list[str], name: str) -> dict:
    keys = {"model": "gpt2", "pre": name, "tokens": tokens, "token_type": [1] * len(tokens), "merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


def llama_ids(tokens: list[str], merges: list[str], name: str, texts: list[str]) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "v.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for key, value in (("context_length", 64), ("embedding_length", 64), ("block_count", 1), ("feed_forward_length", 64)):
            writer.add_uint32(f"llama.{key}", value)
        writer.add_uint32("llama.attention.head_count", 1)
        writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(merges)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        settings = llama_cpp.llama_model_default_params()
        settings.vocab_only = True
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), settings)
        assert model, name
        vocab = llama_cpp.llama_model_get_vocab(model)
        ids = []
        for text in texts:
            data = text.encode()
            out = (llama_cpp.llama_token * (len(data) + 8))()
            count = llama_cpp.llama_tokenize(vocab, data, len(data), out, len(out), False, False)
            assert count >= 0
            ids.append(list(out[:count]))
        llama_cpp.llama_model_free(model)
        return ids


if __name__ == "__main__":
    main()
