"""The ranks of another host: starts the host's agent and exchanges messages with it."""

import math
import os
import pathlib
import shlex
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Protocol

from ckdist import __version__
from ckdist.errors import CommError, ConfigError
from ckdist.launcher.agent_frames import GREETING, FrameReader, packed
from ckdist.launcher.channel import Channel
from ckdist.launcher.children import Child, Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.job import Job
from ckdist.launcher.local_ranks import Events, Lines
from ckdist.python_words import module_words

# The default template that runs a command on a host. {host} is the host, {command} the command quoted for a shell. A
# template without {command} gets the words of the command appended.
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=5 -o ServerAliveCountMax=3 {host} {command}"
CLOSE_SECONDS = 10.0  # limit for an agent to end its ranks and itself


class HostEvents(Events, Protocol):
    """Events of a host, in addition to those of its ranks."""

    def said(self, host: str, text: bytes, /) -> None:
        """The program that reaches the host, such as ssh, has written a line."""
        ...

    def counted(self, host: str, nodes: int, /) -> None:
        """The host has `nodes` NUMA nodes: the answer to `RemoteRanks.count_nodes`."""
        ...

    def lost(self, host: str, reason: str, code: int, reached: bool, /) -> None:
        """The host's ranks cannot be started or reached.

        Args:
            code: Exit code of the job, if this ends it.
            reached: The host's agent had answered before.
        """
        ...


def agent_words(template: str, host: str) -> list[str]:
    """Returns the command that starts the agent on `host`. Raises ConfigError if the template is invalid."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(dict.fromkeys([root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]))
    command = ["env", f"PYTHONPATH={path}", *module_words("ckdist.launcher.agent")]
    try:
        words = shlex.split(template)
    except ValueError as error:
        raise ConfigError(f"--agent ({template}) cannot be read: {error}") from None
    if not any("{host}" in word for word in words):
        raise ConfigError(f"--agent ({template}) must contain {{host}}, e.g. 'ssh {{host}} {{command}}'")
    quoted = shlex.join(command)
    filled = [word.replace("{host}", host).replace("{command}", quoted) for word in words]
    return filled if any("{command}" in word for word in words) else [*filled, *command]


class RemoteRanks:
    """Some ranks of a job on another host. `ready` is True after the agent has answered.

    Args:
        words: The command that starts the agent.

    Raises:
        ConfigError: The command cannot be started.
    """

    def __init__(
        self, loop: EventLoop, children: Children, events: HostEvents, host: str, words: Sequence[str]
    ) -> None:
        self._loop, self._events, self.host, self._words = loop, events, host, words
        self.ready = self.done = self._closing = False
        self._close_by = math.inf
        self._last = ""  # last line on the agent's standard error
        inward, outward, errors = os.pipe(), os.pipe(), os.pipe()
        ours = (inward[0], outward[1], errors[0])
        try:
            self._agent = children.start(
                words,
                self._agent_ended,
                streams=(outward[0], inward[1], errors[1]),
                at_our_end=signal.SIGTERM,
            )
        except OSError as error:
            for fd in ours:
                os.close(fd)
            raise ConfigError(f"{words[0]}, which reaches {host}, cannot be started: {error.strerror}") from None
        finally:
            for fd in (inward[1], outward[0], errors[1]):
                os.close(fd)
        self._frames = FrameReader(GREETING)
        self._channel = Channel(loop, inward[0], outward[1], self._take)
        self._errors = Channel(loop, errors[0], None, Lines(self._wrote).add)

    def count_nodes(self) -> None:
        """Requests the number of the host's NUMA nodes; `events.counted` gets it."""
        self._channel.send(packed("count"))

    def start(self, job: Job, ranks: range) -> None:
        """Starts these ranks on the host. `events.lost` gets any failure."""
        self._channel.send(packed("start", asdict(job), ranks.start, len(ranks)))

    def send(self, peer: int, data: bytes) -> None:
        """Sends bytes from the other end of the connection between rank 0 and `peer`; b"": it has ended."""
        self._channel.send(packed("carry", peer, data))

    def signal(self, number: int) -> None:
        """Sends a signal to every rank on the host."""
        self._channel.send(packed("signal", number))

    def kill(self) -> None:
        """Makes the agent end its ranks at once. It has CLOSE_SECONDS from the first call on."""
        self._closing = True
        self._close_by = min(self._close_by, time.monotonic() + CLOSE_SECONDS)
        self._channel.send(packed("kill"))

    def rest(self) -> bool:
        """Waits until the agent has ended its ranks after `kill`. Returns whether it can start ranks again."""
        while not self.done and self._agent.code is None and self._loop.turn(self._close_by):
            pass
        return self.ready and self.done and self._is_connected

    def resume(self, events: HostEvents) -> bool:
        """Prepares a further run after `rest`. Returns False if the agent has ended; it is then closed."""
        if not self._is_connected:
            self.close()
            return False
        self._events, self.done, self._closing, self._close_by = events, False, False, math.inf
        return True

    @property
    def _is_connected(self) -> bool:
        return self._agent.code is None and self._channel.reads

    def close(self) -> None:
        """Makes the agent end its ranks and itself.

        After CLOSE_SECONDS the program that reaches the host is killed. An agent that is still alive ends when its
        connection closes.
        """
        self.kill()
        self._channel.send(packed("leave"))
        while self._agent.code is None and self._loop.turn(self._close_by):
            pass
        self._agent.signal(signal.SIGKILL)
        while self._errors.reads and self._loop.turn(self._close_by):
            pass
        self._channel.close()
        self._errors.close()

    def _wrote(self, line: bytes) -> None:
        self._last = line.decode(errors="replace").strip() or self._last
        if self.ready:
            self._events.said(self.host, line)

    def _take(self, data: bytes) -> None:
        try:
            for message in self._frames.add(data) if data else ():
                self._handle(*message)
        except (CommError, TypeError) as error:
            self._lose(f"the agent on {self.host} sent an invalid message: {error}", 1)
        if not data:
            self._end()

    def _handle(self, word: str, *parts: object) -> None:
        if word == "hello":
            self.ready = parts == (__version__,)
            if not self.ready:
                self._lose(f"{self.host} has ckdist {parts[0]}, and this host {__version__}: install one version", 2)
        elif word == "failed":
            text, code = parts
            self._lose(str(text), code if isinstance(code, int) else 1)
        elif word == "done":
            self.done = True
        elif word in ("line", "carry", "ended", "counted"):
            getattr(self._events, word)(self.host, *parts)
        else:
            raise CommError(f"this version does not know the message {word!r}")

    def _lose(self, reason: str, code: int) -> None:
        if not self.done and not self._closing:
            self.done = True
            self._events.lost(self.host, reason, code, self.ready)

    def _agent_ended(self, _: Child) -> None:
        self._channel.read_all()
        self._end()

    def _end(self) -> None:
        """Reports the host as lost if the agent or its connection has ended and the last message has been read."""
        child = self._agent
        if child.code is None or self._channel.reads:
            return
        self._errors.read_all()
        how = f"signal {-child.code}" if child.code < 0 else f"code {child.code}"
        state = "was lost" if self.ready else "cannot be reached"
        said = f": {self._last}" if self._last else ""
        self._lose(f"host {self.host} {state}, {self._words[0]} ended with {how}{said}", 1)
