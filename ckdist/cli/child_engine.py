"""`python -m ckdist.cli.child_engine serve …`: an engine without an HTTP process, which ends with its parent."""

import os
import sys

from ckdist.cli.main import main
from ckdist.engine.socket_directory import PARENT
from ckdist.prctl import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ[PARENT]))
    sys.exit(main())
