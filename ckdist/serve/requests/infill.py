"""Prompts for llama-server's /infill, and for the `suffix` of a completion.

The texts before and after a gap are put around the vocabulary's own tokens for infill. Bavarian et al. 2022,
arXiv:2207.14255.
"""

from dataclasses import dataclass
from typing import Any

from ckdist.errors import RequestError
from ckdist.serve.requests.prompt import check_length
from ckdist.serve.requests.request_fields import Fields, wrong
from ckdist.serve.text_records import ModelFacts
from ckdist.tokens.tokenizer import Tokenizer

MAX_FILES = 256
# Models' marks before the text that precedes the gap, before the text that follows it, and before the gap's text.
MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, GLM
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, SantaCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - DeepSeek
    ("<|fim▁begin|>", "<|fim▁hole|>", "<|fim▁end|>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("<PRE>", "<SUF>", "<MID>"),
)
FILE_MARKS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<reponame>")  # before another file


@dataclass(frozen=True)
class Gap:
    """A gap between two texts."""

    before: str
    behind: str
    begin: str  # beginning of the text in the gap
    files: tuple[tuple[str, str], ...]  # (name, text) of other files that belong to it


def read_gap(body: dict[str, Any]) -> tuple[Gap, dict[str, Any]]:
    """Returns the gap, and the other fields of a body of /infill. Raises RequestError if there is no gap."""
    fields = Fields(body)
    before, behind = (fields.text(name) for name in ("input_prefix", "input_suffix"))
    for name, text in (("input_prefix", before), ("input_suffix", behind)):
        if text is None:
            raise wrong(name, "is needed: a string, which may be empty", "missing_required_parameter")
    files = fields.value("input_extra", list) or []
    if len(files) > MAX_FILES:
        raise RequestError(f"input_extra has {len(files)} files; at most {MAX_FILES} are read", "input_extra")
    gap = Gap(before or "", behind or "", fields.text("prompt", ""), tuple(map(_file, files)))
    own = ("input_prefix", "input_suffix", "input_extra", "prompt")
    return gap, {name: value for name, value in body.items() if name not in own}


def infill_tokens(gap: Gap, tokenizer: Tokenizer, facts: ModelFacts, field: str = "input_prefix") -> list[int]:
    """Returns the prompt for a gap: other files, the texts before and after it, and the beginning of its text.

    Raises RequestError, which names `field`, if the vocabulary has no tokens for infill.
    """
    before, behind, middle = _marks(tokenizer, field)
    plain = lambda text: tokenizer.encode(text, add_special=False, parse_special=False)
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id in tokenizer.prefix else None
    separator = next((token for name in FILE_MARKS if (token := _token(tokenizer, name)) is not None), None)
    check_length(tokenizer, "".join([*(text for _, text in gap.files), gap.before, gap.behind]), facts, field)
    files = list[int]()
    for name, text in gap.files:
        files += [*([] if separator is None else [separator]), *plain(f"{name}\n{text}\n")]
    texts = [before, *plain(gap.before), behind, *plain(gap.behind), middle, *plain(gap.begin)]
    return [*([] if bos is None else [bos]), *files, *texts]


def _file(item: Any) -> tuple[str, str]:
    name, text = (item.get("filename", "tmp"), item.get("text")) if isinstance(item, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(text, str):
        text = "must hold objects with `text` and, if there is one, `filename`, which are strings"
        raise wrong("input_extra", text, "invalid_type")
    return name, text


def _marks(tokenizer: Tokenizer, field: str) -> tuple[int, int, int]:
    for names in MARKS:
        found = [token for name in names if (token := _token(tokenizer, name)) is not None]
        if len(found) == len(names):
            return found[0], found[1], found[2]
    message = f"{field} asks for infill, as /infill does; this model's vocabulary has no tokens for infill"
    raise RequestError(f"{message}: use a model that was trained for it", field, "unsupported_parameter")


def _token(tokenizer: Tokenizer, name: str) -> int | None:
    return tokenizer.backend.token_to_id(name)
