"""The trace of a training: the steps of every thread, and a rank's work between them (`ckdist/engine/trace.py`)."""

from contextlib import AbstractContextManager

from ckdist import native
from ckdist.comm.world_protocol import World
from ckdist.engine.trace import Labels, Trace
from ckdist.program.lowered import Lowered, layer_of
from ckdist.program.step import PackIndex, ParameterIndex
from ckdist.train.native_executable import NativeExecutable


class TrainingTrace:
    """The trace of one rank. All ranks construct it together.

    Raises:
        ConfigError: On every rank, if rank 0 cannot write `path`.
    """

    def __init__(self, path: str, world: World, executable: NativeExecutable) -> None:
        self._trace = Trace(path, world, executable.pool.threads)
        self._labels = labels(executable.program.lowered)
        executable.trace(self._trace.handle)

    def span(self, name: str) -> AbstractContextManager[None]:
        """Writes an event around the `with` block. `name`: data, run, update or save."""
        return self._trace.span(getattr(native.lib, f"ckdist_trace_{name}"))

    def save(self) -> None:
        """Writes the file on rank 0. A collective call."""
        self._trace.save(self._labels)

    def save_own(self) -> None:
        """Writes the events of rank 0 alone, after a failure."""
        self._trace.save_own(self._labels)


def labels(lowered: Lowered) -> Labels:
    """By list of steps: its name, and the kind with the names of its weights, and the layer of each step."""
    found = []
    for number, steps in enumerate(lowered.lists):
        own: list[tuple[str, int | None]] = []
        for step in steps.steps:
            indices = [p for pack in step.operands(PackIndex) for p in lowered.packs[pack][1]]
            names = [lowered.parameters[int(p)].name for p in [*indices, *step.operands(ParameterIndex)]]
            layers = [layer for name in names if (layer := layer_of(name)) is not None]
            parts = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in names)
            own.append((" ".join([step.kind, *parts]), layers[-1] if layers else None))
        found.append((f"{'backward' if number % 2 else 'forward'} of chunk {number // 2}", own))
    return found
