"""The models of a rank: rank 0 loads and unloads them while steps of others run, and the other ranks follow.

A load is a command, a thread on each rank, and an `add`. The thread opens the file, traces, lowers and packs. It alone
uses the World meanwhile, and the model has a communicator of its own, so nothing of a load meets the steps. The loop
of commands runs on the rank's first thread and is C++, so it needs no GIL while steps run.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from ckdist.comm.world_protocol import World, has_mpi
from ckdist.errors import ConfigError
from ckdist.program.executable import Executable
from ckdist.worker.colocation import Colocation
from ckdist.worker.load_world import LoadWorld

SWITCH_SECONDS = 2e-4  # Python gives the GIL to rank 0's steps so often while a model loads; its default is 5 ms


class LoadedModel(Protocol):
    """One rank of a loaded model (`ckdist.engine.loaded_model.Model`)."""

    @property
    def executable(self) -> Executable:
        """The model's steps on this rank."""
        ...

    def free(self) -> None:
        """Frees weights, cache and buffers."""
        ...


Load = Callable[[Any, World, Colocation], LoadedModel]


class _Loading:
    """A model on its way, in a thread of its own."""

    def __init__(self, request: Any, world: World, colocation: Colocation, load: Load) -> None:
        self.colocation = colocation
        self.result: LoadedModel | None = None
        self.reason = ""  # why it failed
        self._arguments = request, LoadWorld(world), load
        self._thread = threading.Thread(target=self._run, name=f"load of model {colocation.model}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        request, world, load = self._arguments
        with contextlib.suppress(OSError):  # a CPU went offline meanwhile
            os.sched_setaffinity(0, self.colocation.worker.cpus)
        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            result = load(world.broadcast(request), world, self.colocation)
            world.gather(None)
            self.result = result
        except Exception as error:
            self.reason = world.fail(error)
        finally:
            sys.setswitchinterval(before)

    def is_done(self) -> bool:
        """True if the thread has ended."""
        return not self._thread.is_alive()

    def wait(self) -> LoadedModel | None:
        """Returns the model, or None if a rank could not load it."""
        self._thread.join()
        return self.result


class RankModels:
    """The models of this rank by number.

    On rank 0 every call is made by the thread that runs steps, while no step is in flight. The other ranks call `work`.

    Args:
        first: The model that the job started with.
        world: All ranks. Nobody else uses it while a model loads.
        load: Loads a model for a request of `begin_load`. All ranks call it together, on threads of their own.
    """

    def __init__(self, first: LoadedModel, world: World, load: Load) -> None:
        self.worker = first.executable.worker
        self.loaded = {first.executable.model: first}
        self._world, self._load = world, load
        self._last = first.executable.model  # number of the newest model
        self._loading: _Loading | None = None
        self._freeing: list[threading.Thread] = []

    def begin_load(self, request: Any) -> int:
        """Rank 0: begins to load a model on every rank, and returns its number. `request` is msgpack-able.

        Raises:
            ConfigError: A load is under way, or MPI allows no calls of another thread.
        """
        if self._loading is not None:
            raise ConfigError(f"model {self._last} is being loaded; load the next one after it")
        if has_mpi(self._world) and (level := self._world.mpi.Query_thread()) < self._world.mpi.THREAD_MULTIPLE:
            raise ConfigError(
                f"this MPI allows thread level {level}, and {self._world.mpi.THREAD_MULTIPLE} (MPI_THREAD_MULTIPLE) is "
                "needed to load a model while others run: use a build of MPI with it, or ckdist launch"
            )
        self.worker.send("load", self._last + 1)
        self._begin(self._last + 1, request)
        return self._last

    def is_loading(self) -> bool:
        """Whether a load is under way. `finish_load` does not wait once it is not."""
        return self._loading is not None and not self._loading.is_done()

    def finish_load(self) -> LoadedModel:
        """Rank 0: waits for the load and makes the model one that may run.

        Raises:
            ConfigError: A rank could not load it. Other models are not affected.
        """
        assert self._loading is not None  # after begin_load
        loading = self._loading
        if loading.wait() is None:
            self.unload(self._last)
            raise ConfigError(loading.reason)
        self.worker.send("add", self._last)
        return self._add()

    def unload(self, model: int) -> None:
        """Rank 0: ends a model. Its memory is freed while the others run."""
        self.worker.send("unload", model)
        self._drop(model)

    def work(self) -> None:
        """Ranks other than 0: executes rank 0's commands until it stops."""
        while True:
            kind, model = self.worker.work()
            if kind == "stop":
                return
            if kind == "load":
                self._begin(model, None)
            elif kind == "add":
                self._add()
            else:
                self._drop(model)

    def close(self) -> None:
        """Ends the job: rank 0 stops the other ranks, and all models are freed."""
        if self._world.rank == 0:
            if self._loading is not None:
                self.finish_load()
            self.worker.send("stop")
        self.worker.close()
        for thread in self._freeing:
            thread.join()
        for model in self.loaded.values():
            model.free()
        self.worker.communicator.close()

    def _begin(self, model: int, request: Any) -> None:
        """Splits the model's communicator between two steps: its barriers are not those of the job's."""
        communicator = self.worker.communicator.split(0)
        assert communicator is not None  # the color is not negative
        self._last = model
        self._loading = _Loading(request, self._world, Colocation(self.worker, communicator, model), self._load)

    def _add(self) -> LoadedModel:
        loading, self._loading = self._loading, None
        assert loading is not None  # after a load
        model = loading.wait()
        assert model is not None  # rank 0 has this from all ranks
        model.executable.join()
        self.loaded[self._last] = model
        return model

    def _drop(self, number: int) -> None:
        if number not in self.loaded:  # it was not loaded
            assert self._loading is not None
            self._loading.wait()
            self._loading.colocation.communicator.close()
            self._loading = None
            return
        thread = threading.Thread(target=self.loaded.pop(number).free, name=f"freeing of model {number}")
        self._freeing = [*(t for t in self._freeing if t.is_alive()), thread]
        thread.start()
