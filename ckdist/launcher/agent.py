"""`python -m ckdist.launcher.agent`: starts the ranks of one host for a supervisor on another host.

It reads commands from standard input and writes events to standard output (`agent_frames`). If its input ends, because
the supervisor or the connection is lost, it ends its ranks and itself.
"""

import os
import signal
import sys
import time
from typing import Any

from ckdist import __version__
from ckdist.errors import CkdistError, CommError
from ckdist.launcher.agent_frames import GREETING, FrameReader, packed
from ckdist.launcher.channel import Channel
from ckdist.launcher.children import Children
from ckdist.launcher.event_loop import EventLoop
from ckdist.launcher.job import Job
from ckdist.launcher.keeper import Keeper
from ckdist.launcher.local_ranks import LocalRanks, StartError, nodes_here

IDLE_SECONDS = 120.0  # limit for a job to arrive
FLUSH_SECONDS = 10.0  # limit for sending the last messages
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """One host's end of the connection to the supervisor.

    Args:
        reader: Descriptor of the input. The agent owns it.
        writer: Descriptor of the output. The agent owns it.
    """

    def __init__(self, reader: int, writer: int) -> None:
        self.loop, self.children = EventLoop(), Children()
        self.keeper: Keeper | None = None  # of a job whose hosts keep weights: the agent then stays for its next run
        self.ranks = LocalRanks(self.loop, self.children, self, "")
        self.frames = FrameReader()
        self.started = self.ended_by_itself = self.ending = self.leaving = False
        self.channel = Channel(self.loop, reader, writer, self._take)

    def line(self, _: str, rank: int, stream: int, text: bytes) -> None:
        """Sends a line of a rank to the supervisor."""
        self.channel.send(packed("line", rank, stream, text))

    def carry(self, _: str, peer: int, data: bytes) -> None:
        """Sends bytes of the connection between rank 0 and rank `peer` to the supervisor."""
        self.channel.send(packed("carry", peer, data))

    def ended(self, _: str, rank: int, code: int) -> None:
        """Sends the exit code of a rank to the supervisor."""
        self.channel.send(packed("ended", rank, code))

    def run(self) -> int:
        """Runs until the job or the supervisor has ended. Returns 0.

        If the job keeps weights, the agent stays after a run until the supervisor ends it.
        """
        handlers = dict.fromkeys(ENDING, self._leave)
        with self.loop.signals({signal.SIGCHLD: lambda _: self.children.reap(), **handlers}):
            self.channel.send(GREETING + packed("hello", __version__))
            deadline = time.monotonic() + IDLE_SECONDS
            while not self.leaving:
                self.loop.turn(time.monotonic() + 60)
                self.children.hurry()
                if not self.started and self.keeper is None and time.monotonic() > deadline:
                    break
                over = self.started and self.ranks.done
                if over or self.ending:
                    if self.keeper is None:
                        break
                    self._end_run()
                    self.ended_by_itself = over
            self._end_run()
            if self.keeper is not None:
                self.keeper.forker.close()
            deadline = time.monotonic() + FLUSH_SECONDS
            while self.channel.writes and self.loop.turn(deadline):
                pass
        return 0

    def _end_run(self) -> None:
        self.ranks.close()
        self.channel.send(packed("done"))
        self.ranks = LocalRanks(self.loop, self.children, self, "", self.keeper)
        self.started = self.ending = False

    def _leave(self, *_: object) -> None:
        self.leaving = True

    def _take(self, data: bytes) -> None:
        if not data:
            self._leave()
            return
        try:
            for message in self.frames.add(data):
                self._handle(message)
        except (CommError, TypeError, ValueError, KeyError) as error:
            self._fail(f"the supervisor sent an invalid message: {error}", 1)

    def _handle(self, message: list[Any]) -> None:
        word, *parts = message
        if word == "start":
            job, first, count = parts
            self.started = True
            try:
                self._start(Job.from_dict(job), range(first, first + count))
            except StartError as error:
                self._fail(str(error), error.code)
        elif word == "count":
            try:
                self.channel.send(packed("counted", nodes_here()))
            except CkdistError as error:  # e.g. a missing library
                self._fail(str(error), 1)
        elif word == "carry":
            self.ranks.send(*parts)
        elif word == "signal":
            self.ranks.signal(*parts)
        elif word == "kill":
            # A run gets one "done": this may have crossed one that is on its way.
            self.ending, self.ended_by_itself = not self.ended_by_itself, False
        elif word == "leave":
            self._leave()
        else:
            self._fail(f"the supervisor sent {word!r}, which this version does not know", 1)

    def _start(self, job: Job, ranks: range) -> None:
        if job.keeps and self.keeper is None:
            self.keeper = Keeper()
            self.ranks = LocalRanks(self.loop, self.children, self, "", self.keeper)
        self.ranks.start(job, ranks)

    def _fail(self, text: str, code: int) -> None:
        self.channel.send(packed("failed", text, code))
        self._leave()


def main() -> int:
    """Runs the agent on standard input and output. Ranks do not share them."""
    reader, writer = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    return Agent(reader, writer).run()


if __name__ == "__main__":
    sys.exit(main())
