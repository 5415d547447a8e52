"""The program `ckdist`. An interrupt while it imports its command ends it without a traceback."""

import os


def command() -> None:
    """Runs the command of `sys.argv`, and ends the process."""
    try:
        from ckdist.cli.main import command as run_command

        run_command()
    except KeyboardInterrupt:
        os._exit(130)
