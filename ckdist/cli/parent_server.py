"""A launcher of an engine's ranks asks its parent, `ckdist serve`, before it starts them again.

The parent first makes its HTTP process ready for the next engine (`ckdist/cli/serve_restarting.py`).
"""

import os
import select

from ckdist.comm.bootstrap.launchers import AGAIN
from ckdist.engine.socket_directory import DIRECTORY, LOST

ANSWER_SECONDS = 30.0


def has_parent_server() -> bool:
    """Returns True if `ckdist serve` has started the ranks as an engine."""
    return DIRECTORY in os.environ


def may_restart(reason: str) -> dict[str, str] | None:
    """Writes why the ranks have ended and waits for the parent.

    Returns:
        Variables for the restarted ranks; None: the parent gives up.
    """
    print(LOST + reason, flush=True)
    ready, _, _ = select.select([0], [], [], ANSWER_SECONDS)
    return {AGAIN: "1"} if ready and os.read(0, 1) == b"\n" else None
