"""Loads tokenizers and templates from hostile files, in processes with limits that the kernel enforces.

A zygote loads the tokenizer under limits and tries it (see `probe`). Then it forks workers, which need not load it
again. The result is a `Vocabulary`. Text of strangers is tokenised in workers. A command that tokenises its own user's
text may use the tokenizer at full speed in its own process, once it has passed here.
"""

import contextlib
import json
import logging
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgpack

from ckdist.errors import EngineError, ModelFileError
from ckdist.python_words import module_words
from ckdist.tokens.process_limits import REMEDY, Limits
from ckdist.tokens.vocabulary import MAX_PIECES_BYTES, Vocabulary
from ckdist.tokens.vocabulary_file import RANKS, vocabulary_file

Overrides = Mapping[str, int | float | bool | str] | None  # of a GGUF file's metadata
COMMAND_LOG_FORMAT = "%(message)s"  # the format of `ckdist`'s own log
END_SECONDS = 1.0  # from the end of a process's output to its exit
SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)  # variables that a text process never needs
MAX_RESULT = MAX_PIECES_BYTES + (64 << 20)


def loading_limits(model: str | Path) -> Limits:
    """Limits by the size of tokenizer.json. Published ones of 2 to 33 MB need a fifth of them.

    A byte of tiktoken.model counts eightfold. The size of a GGUF file says nothing about its vocabulary, so a fixed
    size is assumed.
    """
    path = vocabulary_file(Path(model))
    try:
        size = path.stat().st_size * (8 if path.name == RANKS else 1)
    except OSError:
        size = 64 << 20
    return Limits(cpu=10 + 0.4e-6 * size, memory=(1 << 30) + 8 * size)


class Zygote:
    """The process that loads a tokenizer. The constructor returns at once; `load` waits for the result.

    The process ends with the thread that started it, so that thread must live on.

    Args:
        handler: `module:function` that workers call, (tokenizer, head, body) -> (head, body). None: no worker is
            forked.
        log_format: Format of log lines in the process and its workers, as for logging.Formatter.
    """

    def __init__(
        self,
        model: str | Path,
        overrides: Overrides = None,
        handler: str | None = None,
        limits: Limits | None = None,
        log_format: str = COMMAND_LOG_FORMAT,
    ):
        self.model, self.limits = str(model), limits or loading_limits(model)
        self._number = 0
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        settings = {
            "parent": os.getpid(),
            "model": self.model,
            "overrides": dict(overrides or {}),
            "handler": handler,
            "limits": [self.limits.cpu, self.limits.memory],
            "level": logging.getLogger().getEffectiveLevel(),
            "format": log_format,
        }
        with theirs:
            self.process = subprocess.Popen(
                module_words("ckdist.tokens.zygote"),
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                env={
                    **{name: value for name, value in os.environ.items() if not SECRET.search(name)},
                    "TOKENIZERS_PARALLELISM": "false",
                    "OPENBLAS_NUM_THREADS": "1",
                    "RUST_BACKTRACE": "0",
                },
            )
        self.control.send(json.dumps(settings, ensure_ascii=False).encode(errors="surrogatepass"))

    def load(self) -> Vocabulary:
        """Waits for the model's vocabulary. Raises ModelFileError if it cannot be loaded within the limits."""
        with self._output as output:
            data = output.read(MAX_RESULT + 1)
        try:
            result = msgpack.unpackb(data, max_bin_len=MAX_RESULT)
        except (ValueError, msgpack.UnpackException):
            result = {}
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_SECONDS)  # its exit status says why
        if "vocabulary" in result:
            return Vocabulary.from_bytes(result["vocabulary"])
        self.close()
        if "refused" in result:
            raise ModelFileError(result["refused"])
        raise ModelFileError(
            f"the tokenizer of {self.model} takes more than {self.limits.cpu:.0f} s of CPU time or "
            f"{self.limits.memory >> 20} MB to load and try (its process ended with {self.process.returncode}); "
            f"{REMEDY}"
        )

    def fork(self) -> tuple[int, socket.socket]:
        """Forks a worker. Returns its number and our end of its socket. Raises EngineError if the zygote has ended."""
        self._number += 1
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self.control, [b"F%d" % self._number], [theirs.fileno()])
        except OSError as error:
            ours.close()
            raise EngineError(f"the tokenizer's process has ended: {error.strerror}") from None
        return self._number, ours

    def kill(self, number: int) -> None:
        """Kills worker `number`."""
        with contextlib.suppress(OSError):  # the zygote has ended, and its workers with it
            self.control.send(b"K%d" % number)

    def signal_of(self, number: int) -> int | None:
        """The signal that ended worker `number`, 0 if none did, None if the process has ended itself.

        Waits for the answer. Only one thread at a time may call it.
        """
        with contextlib.suppress(OSError, ValueError):
            self.control.send(b"S%d" % number)
            return int(self.control.recv(16))
        return None

    def close(self) -> None:
        """Ends the process and its workers."""
        self.control.close()
        self._output.close()
        self.process.kill()
        self.process.wait()

    @property
    def _output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def load_vocabulary(model: str | Path) -> Vocabulary:
    """Loads the vocabulary of a model with an untrusted tokenizer. Raises ModelFileError like `Zygote.load`."""
    with Zygote(model) as zygote:
        return zygote.load()
