"""`ckdist WORDS...`, which says "ready" once requests may come, takes a second to free its weights, and ends with code
70 if it reads their progress later.
"""

import os
import sys
import time

from ckdist.cli.main import main
from ckdist.engine.coordinator import Coordinator
from ckdist.weights.loader import ShardLoader

free, begin = ShardLoader.free, Coordinator.begin


def slow_free(loader: ShardLoader) -> None:
    free(loader)
    ShardLoader.filled = property(lambda _: os._exit(70))
    time.sleep(1.2)  # two status messages


def begin_aloud(*arguments) -> None:
    begin(*arguments)
    print("ready", flush=True)


ShardLoader.free, Coordinator.begin = slow_free, begin_aloud
sys.exit(main(sys.argv[1:]))
