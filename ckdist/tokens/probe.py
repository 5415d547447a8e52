"""Tries a tokenizer on texts that make bad or hostile patterns and normalisers explode.

Call it in a process with limits: only these end a pattern that never ends.
"""

import json
import time
from typing import Any

from ckdist.errors import ModelFileError, RequestError, one_line
from ckdist.tokens.process_limits import REMEDY
from ckdist.tokens.tokenizer import Tokenizer

LENGTHS = (16, 64, 1024, 16384)  # characters
COMMON = "aZ0 \n.-_\t\r日é😀'"
MAX_OWN = 48  # number of characters to try from the file's own patterns
GROWTH, SLACK = 32, 4096  # a normaliser may turn n characters into GROWTH * n + SLACK
MAX_SECONDS = 2.0  # of CPU time for one text of at most 16384 characters


def probe(tokenizer: Tokenizer, model: str) -> None:
    """Raises ModelFileError, one line, if the tokenizer fails, grows or hangs on runs of characters."""
    rules = _rules(tokenizer)
    own = dict.fromkeys(c for c in rules if c.isprintable() and c not in COMMON)
    letters = [*COMMON, *list(own)[:MAX_OWN]]
    texts = [letter * length for length in LENGTHS for letter in letters]
    texts += ["".join(letters) * 64, "a b" * 2000, "aZ" * 4000, "a\n" * 4000]
    normalizer = tokenizer.backend.normalizer
    for text in texts:
        begun = time.process_time()
        try:
            if normalizer is not None:
                grown = len(normalizer.normalize_str(text))
                if grown > GROWTH * len(text) + SLACK:
                    raise ModelFileError(
                        f"the tokenizer of {model} makes {grown} characters of {len(text)} ({text[:1]!r} ...); {REMEDY}"
                    )
            tokenizer.encode(text)
        except RequestError as error:
            raise _refusal(model, text, str(error)) from None
        except (ModelFileError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in the library is a BaseException
            raise _refusal(model, text, one_line(error)) from None
        seconds = time.process_time() - begun
        if seconds > MAX_SECONDS:
            raise _refusal(model, text, f"it takes {seconds:.1f} s")


def _refusal(model: str, text: str, why: str) -> ModelFileError:
    return ModelFileError(f"the tokenizer of {model} fails on a run of {len(text)} times {text[:1]!r}: {why}; {REMEDY}")


def _rules(tokenizer: Tokenizer) -> str:
    """The characters in the patterns of the normaliser and of the pre-tokenizer."""
    parts = (tokenizer.backend.normalizer, tokenizer.backend.pre_tokenizer)
    return "".join(_texts(json.loads(part.__getstate__())) for part in parts if part is not None)


def _texts(value: Any) -> str:
    if isinstance(value, dict):
        return "".join(_texts(part) for key, part in value.items() if key != "type")
    if isinstance(value, list):
        return "".join(map(_texts, value))
    return value[:4096] if isinstance(value, str) else ""
