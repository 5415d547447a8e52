"""Makes tests/golden/tiktoken: a small file of ranks in the form of Kimi-K2's, and what tiktoken itself makes of texts
in many scripts.

    pip install tiktoken tokenizers && python tests/golden/make_tiktoken_golden.py

    tiktoken.model  lines of a token in base64 and its rank
    cases.json      special tokens of the maker's, and (text, ids) of tiktoken with all of them allowed
The vocabulary is trained here, on a module of the standard library and lines in other scripts, by the
`tokenizers` library.
"""

import base64
import dataclasses
import json
import random
from pathlib import Path

import tiktoken
from tokenizers import Tokenizer, models, trainers

from ckdist.tokens.pieces import byte_level_bytes
from ckdist.tokens.splits import SPLITS

OUT = Path(__file__).parent / "tiktoken"
SPLIT = SPLITS["kimi-k2"]
SCRIPTS = [
    "北京市 东京都 汉字和English混合 中文,世界 你好世界", "日本語の文章はかなと漢字 カタカナ", "Ünïcödé straße naïve café",
    "한국어 문장 안녕하세요",
    "Привет, мир! Это русский текст", "Ελληνικά κείμενο", "עברית טקסט", "نص باللغة العربية",
    "हिन्दी में पाठ", "ข้อความภาษาไทย", "😀🎉 👩‍👩‍👧 🇫🇷",
]  # fmt: skip
SPECIAL = {
    0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 11: "<|tool_calls_section_begin|>", 254: "[UNK]",
    255: "[PAD]",
}  # fmt: skip
TEXTS = [
    "", " ", "\n\n \n", "hello", "Hello, world!", "1234567890 x86_64", "中文English混合",
    "汉字abc漢字かなカナ", "北京市Pascal's", "don't I'LL we've",
    "def f(x):\n        return x\n\n\n", "\ttab\r\n", "<|im_user|>hi<|im_end|>[EOS]<|im_end",
    "<|reserved_token_{}|> and <|tool_calls_section_begin|>",
    "e\u0301 é ﬁ ½ Ⅻ", "aaaaaaaaaaaaa", "......!!!!!///\n", "   leading", *SCRIPTS,
]  # fmt: skip
COUNT = 700


def main() -> None:
    OUT.mkdir(exist_ok=True)
    ranks = train()
    lines = [f"{base64.b64encode(piece).decode()} {rank}\n" for piece, rank in ranks.items()]
    (OUT / "tiktoken.model").write_text("".join(lines))
    special = {SPECIAL.get(i, f"<|reserved_token_{len(ranks) + i}|>"): len(ranks) + i for i in range(256)}
    encoding = tiktoken.Encoding("small", pat_str=SPLIT.patterns[0], mergeable_ranks=ranks, special_tokens=special)
    rng = random.Random(3)
    letters = "abcdeinorst   \n\t.,()='_0123EHT北京市汉字中文かナ한Пé😀\u0301"
    texts = [text.format(len(ranks) + 5) if "{}" in text else text for text in TEXTS]
    texts += ["".join(rng.choices(letters, k=rng.randrange(1, 60))) for _ in range(60)]
    cases = [[text, encoding.encode(text, allowed_special="all")] for text in texts]
    found = {"special": {str(len(ranks) + i): content for i, content in SPECIAL.items()}, "cases": cases}
    (OUT / "cases.json").write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


def train() -> dict[bytes, int]:
    """Bytes in their order, then what is joined, sooner first."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = SPLIT.pre_tokenizer()
    lines = Path(dataclasses.__file__).read_text(encoding="utf-8").split("\n") + SCRIPTS * 12
    made.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=COUNT, show_progress=False))
    bytes_first = {bytes([byte]): byte for byte in range(256)}
    merges = ["".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    joined = dict.fromkeys(map(byte_level_bytes, merges))  # one that is made in two ways counts once
    return bytes_first | {piece: 256 + at for at, piece in enumerate(list(joined)[: COUNT - 256])}


if __name__ == "__main__":
    main()
