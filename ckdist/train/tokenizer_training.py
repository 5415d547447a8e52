"""Trains a byte-level BPE tokenizer for a new model on its data, as the files of a Hugging Face folder."""

from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import decoders, models, processors, trainers

from ckdist.tokens.splits import THREE_DIGITS

END_OF_TEXT, USER, ASSISTANT, END = SPECIAL_TOKENS = ("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>")
SAMPLE_CHARACTERS = 64 << 20  # merges are counted in the first characters of the data

CHAT_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|assistant|>\\n' + message.content + '<|end|>\\n' }}
    {%- elif message.role == 'user' or message.role == 'system' %}
        {{- '<|user|>\\n' + message.content + '<|end|>\\n' }}
    {%- else %}
        {{- raise_exception('role ' + message.role + ' is not known; use system, user or assistant') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Returns a tokenizer of at most `vocab_size` tokens.

    Special tokens come first, so <|endoftext|> is 0. It begins every text.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = THREE_DIGITS.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIAL_TOKENS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_sample(texts), trainer)
    first = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B", special_tokens=[(END_OF_TEXT, 0)]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), first])
    return tokenizer


def _sample(texts: Iterable[str]) -> Iterator[str]:
    left = SAMPLE_CHARACTERS
    for text in texts:
        yield text[:left]
        left -= len(text)
        if left <= 0:
            return


def tokenizer_config(max_length: int) -> dict[str, Any]:
    """The contents of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "additional_special_tokens": list(SPECIAL_TOKENS[1:]),
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
