"""Loads the tokenizer of a Hugging Face folder.

It reads `tokenizer.json` or `tiktoken.model`, and the files with BOS, EOS and chat rules.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from ckdist.errors import ModelFileError, one_line
from ckdist.regular_file import read_regular
from ckdist.tokens.pieces import CONTINUES, SPACE, byte_level_bytes, sentencepiece_bytes, text_bytes, wordpiece_bytes
from ckdist.tokens.tokenizer import Tokenizer
from ckdist.tokens.vocabulary_file import MAX_TOKENIZER_BYTES, RANKS, vocabulary_file

MAX_CONFIG_BYTES = 32 << 20
MAX_TEMPLATE_BYTES = 1 << 20
MAX_VOCAB = 4 << 20

# Classes that put BOS before a text even if `tokenizer.json` does not say so.
BOS_BY_DEFAULT = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer")
# If one of these ends a text, so does the other: it ends a call of a tool.
ENDS_OF_MESSAGES = ("<|return|>", "<|call|>")


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer in the folder `path`, or in the folder of the file `path`.

    Reads tokenizer.json, or tiktoken.model if that is missing. Also reads these files if they exist:
    tokenizer_config.json, config.json, generation_config.json, chat_template.jinja and additional_chat_templates/.

    Raises ModelFileError, one line, if a file is missing, too large or malformed.
    """
    folder = Path(path)
    folder = folder if folder.is_dir() else folder.parent
    if (folder / "source.spm").is_file() and not (folder / "tokenizer.json").is_file():
        raise ModelFileError(
            f"{folder} has SentencePiece files for two languages (source.spm, target.spm) and no tokenizer.json: "
            "convert it with transformers"
        )
    config = _read_json(folder / "tokenizer_config.json")
    model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
    source = vocabulary_file(folder)
    if source.name == RANKS:
        from ckdist.tokens.tiktoken import MAX_RANKS_BYTES, backend_of_ranks, split_of_type

        split = split_of_type(model.get("model_type"), source)
        ranks = _read_bytes(source, MAX_RANKS_BYTES)
        backend = _guarded(source, lambda: backend_of_ranks(ranks, source, split, config.get("added_tokens_decoder")))
    else:
        backend = _read_backend(source)

    named = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    bos = _first_id(backend, named["bos_token"], generation.get("bos_token_id"), model.get("bos_token_id"))
    eos = _ids(generation.get("eos_token_id")) | _ids(model.get("eos_token_id"))
    if named["eos_token"]:
        eos |= _ids(backend.token_to_id(named["eos_token"]))
    ends = frozenset(filter(None, map(backend.token_to_id, ENDS_OF_MESSAGES)))
    eos |= ends if eos & ends else frozenset()  # some folders name only one
    prefix, suffix = _special_ids_around(backend)
    prefix = _with(prefix, bos, _rule(config, "add_bos_token"), at_end=False)
    suffix = _with(suffix, _first_id(backend, named["eos_token"]), _rule(config, "add_eos_token"), at_end=True)

    pieces, strips = _pieces(backend, source)
    added = backend.get_added_tokens_decoder()
    return Tokenizer(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(token_id for token_id, token in added.items() if token.special),
        prefix=prefix,
        suffix=suffix,
        middle=_special_ids_between(backend) or suffix,
        bos_token_id=bos,
        eos_token_ids=eos,
        strips_prefix_space=strips,
        templates=_chat_templates(folder, config),
        special_texts={name: text for name, text in named.items() if text},
    )


def _read_bytes(path: Path, limit: int) -> bytes:
    try:
        return read_regular(path, limit)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be read: {error.strerror}; fetch the model's own {path.name}") from None


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    data = _read_bytes(path, MAX_TOKENIZER_BYTES)
    backend = _guarded(path, lambda: tokenizers.Tokenizer.from_buffer(data))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _guarded(path: Path, make: Callable[[], tokenizers.Tokenizer]) -> tokenizers.Tokenizer:
    try:
        return make()
    except (ModelFileError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in the library is a BaseException
        raise ModelFileError(
            f"{path} is not a tokenizer: {one_line(error)}; fetch the model's own {path.name}"
        ) from None


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(_read_bytes(path, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(f"{path} is not JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _token_text(value: object) -> str:
    """A special token of tokenizer_config.json: a string, or an object with `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else ""


def _ids(value: object) -> frozenset[int]:
    values = value if isinstance(value, list) else [value]
    return frozenset(v for v in values if isinstance(v, int) and not isinstance(v, bool) and v >= 0)


def _first_id(backend: tokenizers.Tokenizer, text: str, *configured: object) -> int | None:
    if text and (token_id := backend.token_to_id(text)) is not None:
        return token_id
    return next((token_id for value in configured for token_id in _ids(value)), None)


def _rule(config: dict[str, Any], name: str) -> bool | None:
    """True to add the token: the configuration's value, else the default of its class.

    None: the post-processor decides.
    """
    if isinstance(config.get(name), bool):
        return config[name]
    by_class = name == "add_bos_token" and str(config.get("tokenizer_class", "")).startswith(BOS_BY_DEFAULT)
    return True if by_class else None


def _with(ids: tuple[int, ...], token_id: int | None, rule: bool | None, at_end: bool) -> tuple[int, ...]:
    if rule is None or token_id is None or (token_id in ids) == rule:
        return ids
    if not rule:
        return tuple(i for i in ids if i != token_id)
    return (*ids, token_id) if at_end else (token_id, *ids)


def _special_ids_around(backend: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the post-processor puts before and after a text, found by a trial."""
    bare = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start]), tuple(full[start + len(bare) :])
    return (), ()


def _special_ids_between(backend: tokenizers.Tokenizer) -> tuple[int, ...]:
    """The ids that the post-processor puts between two texts, found by a trial. Empty if it knows only single texts."""
    try:
        pair = backend.encode("a", "a", add_special_tokens=True)
    except Exception:  # the library raises errors of any kind
        return ()
    marks, sequences = list(pair.special_tokens_mask), list(pair.sequence_ids)
    if 0 not in sequences or 1 not in sequences:
        return ()
    last, first = len(sequences) - 1 - sequences[::-1].index(0), sequences.index(1)
    return tuple(pair.ids[i] for i in range(last + 1, first) if marks[i])


def _pieces(backend: tokenizers.Tokenizer, path: Path) -> tuple[list[bytes], bool]:
    """Every token in bytes, and whether decoding strips the space before a text.

    The decoder determines the alphabet.
    """
    steps = _decoder_steps(json.loads(backend.decoder.__getstate__())) if backend.decoder is not None else []
    kinds = {step.get("type") for step in steps}
    wordpiece = next((step for step in steps if step.get("type") == "WordPiece"), None)
    if "ByteLevel" in kinds:
        to_bytes, strips = byte_level_bytes, False
    elif wordpiece is not None:
        mark = str(wordpiece.get("prefix") or CONTINUES)
        to_bytes, strips = (lambda piece: wordpiece_bytes(piece, mark)), True
    elif "ByteFallback" in kinds or "Metaspace" in kinds or any(step.get("content") == " " for step in steps):
        to_bytes = (
            sentencepiece_bytes if "ByteFallback" in kinds else lambda piece: text_bytes(piece.replace(SPACE, " "))
        )
        strips = any(
            (step["type"] == "Strip" and step.get("start", 0) > 0)
            or (step["type"] == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )
    else:
        raise ModelFileError(
            f"{path} has a decoder of {sorted(map(str, kinds)) or 'no kind'}; known: ByteLevel, ByteFallback, "
            "Metaspace, WordPiece"
        )
    vocab = backend.get_vocab(with_added_tokens=True)
    size = max(vocab.values(), default=-1) + 1
    if not 0 < size <= MAX_VOCAB:
        raise ModelFileError(f"{path} has token ids up to {size - 1}; a vocabulary has 1 to {MAX_VOCAB} tokens")
    pieces = [b""] * size
    for piece, token_id in vocab.items():
        pieces[token_id] = to_bytes(piece)
    return pieces, strips


def _decoder_steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder.get("decoders", []) for step in _decoder_steps(inner)]


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Templates by name. A separate file overrides the one in tokenizer_config.json."""
    found = config.get("chat_template")
    templates = {}
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for entry in found:
            if (
                isinstance(entry, dict)
                and isinstance(entry.get("name"), str)
                and isinstance(entry.get("template"), str)
            ):
                templates[entry["name"]] = entry["template"]
    paths = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        paths["default"] = folder / "chat_template.jinja"
    for name, path in paths.items():
        try:
            templates[name] = _read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8")
        except UnicodeDecodeError:
            raise ModelFileError(f"{path} is not UTF-8 text") from None
    return templates
