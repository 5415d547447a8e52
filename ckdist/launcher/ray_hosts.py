"""Nodes of a Ray cluster as the hosts of a job: `ray_nodes` reserves them, `ray_agent` runs commands on each."""

import json
import os
import selectors
import shlex
import signal
import time
from typing import Any

from ckdist.errors import CommError, ConfigError
from ckdist.launcher.children import Child, Children
from ckdist.launcher.hosts import Host
from ckdist.launcher.ray_nodes import HOLD_SECONDS
from ckdist.python_words import module_words

START_SECONDS = 60.0  # limit for importing ray and reaching the cluster
END_SECONDS = 10.0
CHUNK, MAX_LINE = 1 << 16, 1 << 20


class RayHosts:
    """Whole nodes that are reserved within the `with` block.

    Args:
        ranks: Most nodes to reserve. None: all nodes, with one rank each.

    Attributes:
        hosts: The nodes.
        agent: The template that reaches them.

    Raises:
        ConfigError: The user can correct the cause, such as a missing package.
        CommError: The nodes cannot be reserved.
    """

    def __init__(self, children: Children, ranks: int | None) -> None:
        self._children = children
        inward, outward = os.pipe(), os.pipe()
        self._input = outward[1]
        words = module_words("ckdist.launcher.ray_nodes", *([] if ranks is None else [str(ranks)]))
        self._holder = children.start(words, lambda _: None, streams=(outward[0], inward[1], None))
        for fd in (outward[0], inward[1]):
            os.close(fd)
        try:
            answer = _line(inward[0], time.monotonic() + START_SECONDS + HOLD_SECONDS)
        finally:
            os.close(inward[0])
        if "failed" in answer:
            self.__exit__()
            raise (ConfigError if answer["user"] else CommError)(answer["failed"])
        self.hosts = tuple(Host(name, 1 if ranks is None else None) for name in answer["hosts"])
        self.agent = f"{shlex.join(module_words('ckdist.launcher.ray_agent', answer['group']))} {{host}}"

    def __enter__(self) -> "RayHosts":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._input)
        deadline = time.monotonic() + END_SECONDS
        while _runs(self._children, self._holder):
            if time.monotonic() > deadline:
                self._holder.signal(signal.SIGKILL)
            time.sleep(0.02)


def _runs(children: Children, child: Child) -> bool:
    children.reap()
    return child.code is None


def _line(reader: int, deadline: float) -> dict[str, Any]:
    """Reads a line of JSON from a pipe. Raises CommError if there is none in time."""
    data = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while not data.endswith(b"\n") and len(data) < MAX_LINE:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise CommError(f"Ray has given no nodes within {START_SECONDS + HOLD_SECONDS:g} seconds")
            more = os.read(reader, CHUNK)
            if not more:
                raise CommError("the process that reserves nodes of Ray has ended; its own lines say why")
            data += more
    try:
        return json.loads(data)
    except ValueError:
        raise CommError(f"the process that reserves nodes of Ray wrote {data[:100]!r}, which is not JSON") from None
