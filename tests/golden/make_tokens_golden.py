"""Makes tests/golden/tokens: small SentencePiece vocabularies as GGUF metadata, and what sentencepiece itself makes of
varied texts.

    pip install sentencepiece && python tests/golden/make_tokens_golden.py

The vocabularies are trained on a module of the standard library and a few lines in other scripts.
"""

import dataclasses
import io
import json
import random
from pathlib import Path

import sentencepiece

OUT = Path(__file__).parent / "tokens"
SCRIPTS = ["Ünïcödé straße 😀🎉 日本語 テスト Привет мир", "naïve café Ελληνικά עברית العربية हिन्दी"] * 8
TEXTS = [
    "", " ", "  ", "\n", "hello", " hello", "hello ", "a  b   c    d", "def f(x):\n        return x\n\n\n", "\ttab\r\n", "3.14159 1e-5 0x2A",
    "日本語 テスト 😀😀 👩‍👩‍👧 🇫🇷", "é é ﬁ ½", "Привет, мир! עברית", "text <tool> with <turn> marks", "<0x0A> as text", "end<turn> next",
]  # fmt: skip


def main() -> None:
    OUT.mkdir(exist_ok=True)
    lines = Path(dataclasses.__file__).read_text(encoding="utf-8").split("\n") + SCRIPTS
    rng = random.Random(7)
    texts = TEXTS + ["".join(rng.choices("abcdefnrst   \n\t.,()='é日😀_019", k=rng.randrange(1, 60))) for _ in range(40)]
    for kind, model in (("bpe", "llama"), ("unigram", "t5")):
        for adds_space in (True, False):
            processor = train(lines, kind, adds_space)
            metadata = gguf_metadata(processor, model, adds_space)
            # sentencepiece does not parse control tokens in text, the rebuilt tokenizer does; so they are left out
            # here.
            cases = [[text, processor.encode(text)] for text in texts if "<turn>" not in text and "<tool>" not in text]
            name = f"{kind}{'_space' if adds_space else ''}.json"
            (OUT / name).write_text(json.dumps({"metadata": metadata, "cases": cases}, ensure_ascii=False) + "\n", encoding="utf-8")


def train(lines: list[str], kind: str, adds_space: bool) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type=kind, vocab_size=480, byte_fallback=True, character_coverage=0.998,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=adds_space, control_symbols=["<turn>"],
        user_defined_symbols=["<tool>"], minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def gguf_metadata(processor: sentencepiece.SentencePieceProcessor, model: str, adds_space: bool) -> dict:
    ids = range(processor.vocab_size())

    def token_type(i: int) -> int:
        if processor.id_to_piece(i) == "<tool>":
            return 4
        return 2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1

    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [round(processor.get_score(i), 4) for i in ids],
        "tokenizer.ggml.token_type": [token_type(i) for i in ids],
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": adds_space,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }


if __name__ == "__main__":
    main()
