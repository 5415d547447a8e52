"""llama-server's slots for --slot-save-path: the last tokens of each slot, and files of them.

A file holds token ids. Their keys and values are in the prompt cache and on its disk, under names that descend from
these tokens. So a restored file is a prompt that is read ahead: blocks on disk are loaded, the others are computed,
and the answer is always the same. Clients have slots and files of their own.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import re
from collections import OrderedDict
from typing import Any, NamedTuple

from ckdist.engine.messages import TOKEN_BYTES, pack_tokens, unpack_tokens
from ckdist.regular_file import read_regular
from ckdist.serve.accounts import Account
from ckdist.serve.problems import Problem

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
VERSION = 1
MAX_CLIENTS = 256  # whose slots are remembered; the least recently used are forgotten
MAX_FILES = 1024  # of one client
BYTES_PER_TOKEN = 12  # in a file, at most


class Slot(NamedTuple):
    """The last sequence of a slot."""

    tokens: bytes
    salt: str | None = None


class SavedSlots:
    """The slots of all clients, and the folder of their files."""

    def __init__(self, folder: str, slots: int, model: str):
        """`slots` is the number of slots of a client. `model` is stored in files, and compared."""
        self.folder, self.slots, self.model = pathlib.Path(folder), slots, model
        self._kept: OrderedDict[bytes, OrderedDict[int, Slot]] = OrderedDict()

    def check(self, slot: int, given: str | None = None) -> None:
        """Raises Problem 400 unless there is such a slot. `given` is the client's text of it."""
        if not 0 <= slot < self.slots:
            shown = slot if given is None else repr(given[:32])
            raise Problem(400, f"id_slot ({shown}) must be from 0 to {self.slots - 1}", "id_slot", "invalid_value")

    def note(self, account: Account, slot: int, kept: Slot) -> None:
        """Remembers the last sequence of a slot. -1: the slot whose sequence this one continues, or the oldest."""
        own = self._own(account)
        if slot < 0:
            begun = [number for number, old in own.items() if kept.tokens.startswith(old.tokens)]
            free = [number for number in range(self.slots) if number not in own]
            slot = (begun or free or list(own))[0]
        own[slot] = kept
        own.move_to_end(slot)

    def save(self, account: Account, slot: int, name: str) -> tuple[int, int]:
        """Writes a slot's file. Returns its numbers of tokens and of bytes.

        Raises Problem: 400 for an empty slot or a wrong name, 507 if the disk is full.
        """
        self.check(slot)
        kept = self._own(account).get(slot)
        if kept is None:
            raise Problem(400, f"slot {slot} has no tokens yet: send a request with id_slot {slot} first", "id_slot")
        path = self._path(account, name)
        about = {"version": VERSION, "model": self.model, "salt": kept.salt, "tokens": list(unpack_tokens(kept.tokens))}
        data = json.dumps(about, separators=(",", ":")).encode()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            is_full = not path.exists() and sum(1 for _ in path.parent.iterdir()) >= MAX_FILES
            if not is_full:
                made = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
                with open(made, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise Problem(507, f"{name!r} cannot be saved: {error.strerror}") from None
        if is_full:
            raise Problem(400, f"{MAX_FILES} files are saved already; use one of their names", "filename")
        return len(kept.tokens) // TOKEN_BYTES, len(data)

    def read(self, account: Account, slot: int, name: str, vocab_size: int, most_tokens: int) -> tuple[Slot, int]:
        """Reads a file. Returns its sequence and its number of bytes.

        Raises Problem: 404 if the client has no such file, 400 if it is damaged, of another model, or too long.
        """
        self.check(slot)
        path = self._path(account, name)
        try:
            data = read_regular(path, BYTES_PER_TOKEN * most_tokens + (1 << 12))
            found: Any = json.loads(data)
            version, model, salt, tokens = (found[key] for key in ("version", "model", "salt", "tokens"))
            slot_tokens = pack_tokens(tokens)
        except FileNotFoundError:
            raise Problem(404, f"there is no saved file {name!r}", "filename") from None
        except (OSError, ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            message = f"the saved file {name!r} is damaged or too long ({type(error).__name__})"
            raise Problem(400, message, "filename") from None
        if version != VERSION or model != self.model:
            message = f"{name!r} was saved from {str(model)[:64]!r}, and this server has {self.model!r}"
            raise Problem(400, message, "filename")
        if not 1 <= len(tokens) < most_tokens:
            message = f"{name!r} has {len(tokens)} tokens; this server restores 1 to {most_tokens - 1}"
            raise Problem(400, message, "filename")
        if not all(0 <= token < vocab_size for token in tokens) or not (salt is None or isinstance(salt, str)):
            raise Problem(400, f"the saved file {name!r} is damaged: it has a token that the model lacks", "filename")
        return Slot(slot_tokens, salt), len(data)

    def erase(self, account: Account, slot: int) -> int:
        """Forgets a slot's sequence. Returns its number of tokens. Files stay."""
        self.check(slot)
        kept = self._own(account).pop(slot, None)
        return 0 if kept is None else len(kept.tokens) // TOKEN_BYTES

    def _own(self, account: Account) -> OrderedDict[int, Slot]:
        own = self._kept.setdefault(_client(account), OrderedDict())
        self._kept.move_to_end(_client(account))
        if len(self._kept) > MAX_CLIENTS:
            self._kept.popitem(last=False)
        return own

    def _path(self, account: Account, name: str) -> pathlib.Path:
        if not NAME.fullmatch(name):
            message = f"filename ({name[:64]!r}) must be a name of letters, digits, '.', '_' and '-'"
            raise Problem(400, message, "filename")
        return self.folder / _client(account).hex() / name


def _client(account: Account) -> bytes:
    return hashlib.blake2b(account.root, digest_size=8, person=b"ckdist slots").digest()
