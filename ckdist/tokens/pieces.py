"""Converts a vocabulary's strings to bytes: GPT-2's byte-level alphabet, SentencePiece's spaces and byte tokens."""

import re

SPACE = "\u2581"  # ▁, SentencePiece's visible space
CONTINUES = "##"  # before a WordPiece token that continues a word
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 bytes are themselves, the others are the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def byte_level_bytes(piece: str) -> bytes:
    """A byte-level token in bytes. A token with characters outside the alphabet is an added one, and plain text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in piece])
    except KeyError:
        return text_bytes(piece)


def sentencepiece_bytes(piece: str) -> bytes:
    """A SentencePiece token in bytes."""
    byte = BYTE_TOKEN.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else text_bytes(piece.replace(SPACE, " "))


def wordpiece_bytes(piece: str, mark: str = CONTINUES) -> bytes:
    """A WordPiece token in bytes. A token that begins a word gets the space before it."""
    return text_bytes(piece.removeprefix(mark) if piece.startswith(mark) else f" {piece}")


def text_bytes(text: str) -> bytes:
    """A token that is plain text, in bytes."""
    return text.encode("utf-8", "replace")  # a lone surrogate in a hostile vocabulary becomes '?'
