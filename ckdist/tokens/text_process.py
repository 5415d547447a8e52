"""One zygote with one worker, for a command that renders chats. It starts with the first task."""

import socket
from dataclasses import astuple
from pathlib import Path

from ckdist.errors import EngineError, RequestError
from ckdist.tokens import worker_frames
from ckdist.tokens.confined import Overrides, Zygote
from ckdist.tokens.process_limits import Limits

CPU_SECONDS, CPU_SECONDS_PER_BYTE = 0.25, 1.5e-6  # a chat takes 1 ms
MEMORY, MEMORY_PER_BYTE = 256 << 20, 320
GRACE_SECONDS = 2.0  # after the worker's own time limit
TOO_MUCH = "the model's chat template takes too much time or memory"


class TextProcess:
    """A process with limits that answers one task at a time. Its owner closes it.

    Args:
        handler: As for Zygote. The head of its answer may have `refused`, a line for the user.
    """

    def __init__(self, model: str | Path, overrides: Overrides, handler: str):
        self._model, self._overrides, self._handler = model, overrides, handler
        self._zygote: Zygote | None = None
        self._worker: tuple[int, socket.socket] | None = None

    def ask(self, body: bytes, tasks: int = 1) -> bytes:
        """Returns the handler's answer to `body`, which has `tasks` tasks.

        Raises:
            RequestError: The handler refuses or exceeds its limits.
            ModelFileError: The tokenizer does not load.
            EngineError: The process has ended.
        """
        size = len(body)
        limits = Limits(tasks * CPU_SECONDS + CPU_SECONDS_PER_BYTE * size, MEMORY + MEMORY_PER_BYTE * size)
        zygote, (number, connection) = self._started()
        try:
            connection.settimeout(limits.wall + GRACE_SECONDS)
            worker_frames.send(connection, {"limits": astuple(limits)}, body)
            answer = worker_frames.receive(connection)
        except OSError:  # the worker was killed, or its time is up
            answer = None
        if answer is None:
            zygote.kill(number)
            connection.close()
            self._worker = None
            if zygote.process.poll() is not None:
                raise EngineError("the process that renders the chat template has ended; start again")
            raise RequestError(TOO_MUCH, "messages")
        head, text = answer
        if "refused" in head:
            raise RequestError(head["refused"], "messages")
        return text

    def close(self) -> None:
        """Ends the process."""
        if self._worker is not None:
            self._worker[1].close()
        if self._zygote is not None:
            self._zygote.close()
        self._worker = self._zygote = None

    def _started(self) -> tuple[Zygote, tuple[int, socket.socket]]:
        if self._zygote is None:
            self._zygote = Zygote(self._model, self._overrides, self._handler)
            self._zygote.load()
        if self._worker is None:
            self._worker = self._zygote.fork()
        return self._zygote, self._worker
