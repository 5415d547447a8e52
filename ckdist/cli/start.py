"""The program `ckdist`. A failure or an interrupt while it imports its command ends it without a traceback."""

import os
import sys


def command() -> None:
    """Runs the command of `sys.argv`, and ends the process."""
    try:
        from ckdist.errors import CkdistError

        try:
            from ckdist.cli.main import command as run_command
        except CkdistError as error:  # the library cannot be loaded
            sys.exit(f"ckdist: {error}")
        run_command()
    except KeyboardInterrupt:
        os._exit(130)
