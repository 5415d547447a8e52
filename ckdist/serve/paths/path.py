"""A path of the HTTP application, and its other names."""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ckdist.serve.service import Service  # noqa: F401 - the tables of paths import it from here, as Request

VERSION = "/v1"


@dataclass(frozen=True)
class Path:
    """One path. `name` may end with one parameter, as `/v1/models/{name:path}`. GET includes HEAD.

    `about` is for the reference. By default the docstring of `handle` is.
    """

    name: str
    handle: Callable[[Any, Request], Awaitable[Response]]  # gets the Service or the ModelRouter
    methods: tuple[str, ...] = ("GET",)
    about: str = ""


class PathNames:
    """Finds the application's paths by all names: with or without `/v1` before, and with or without a slash after."""

    def __init__(self, names: Iterable[str]):
        names = set(names)
        self._whole = {name for name in names if "{" not in name}
        self._begins = {name.partition("{")[0]: name for name in names - self._whole}

    def resolve(self, path: str) -> tuple[str, str] | None:
        """Returns the path as the application knows it and its name in the table; None for unknown paths."""
        if len(path) > 1:
            path = path.rstrip("/") or "/"
        other = path[len(VERSION) :] if path.startswith(f"{VERSION}/") else VERSION + path
        for candidate in (path, other):
            if candidate in self._whole:
                return candidate, candidate
            for begin, name in self._begins.items():
                if candidate.startswith(begin) and len(candidate) > len(begin):
                    return candidate, name
        return None
