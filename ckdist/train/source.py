"""A user's own source of batches, on every rank of the job.

A function defined in a script on rank 0 travels by cloudpickle, which can run anything: so it goes through the job's own world
alone, whose ranks were started by one launcher or have proved the job's secret, and never through another socket.
"""

from ckdist.comm.tcp_world import TcpWorld
from ckdist.comm.world import MpiWorld
from ckdist.errors import CommError, ConfigError

MAX_BYTES = 32 << 20


def share_source(world, source):
    """Rank 0's source (or None) on every rank. A collective call."""
    if world.size == 1:
        return source
    data, problem = None, None
    if world.rank == 0 and source is not None:
        try:
            data = _cloudpickle().dumps(source)
            if len(data) > MAX_BYTES:
                problem = f"the batch source takes {len(data)} bytes, and at most {MAX_BYTES} are sent to the ranks: let it open its data where it runs"
        except ConfigError as error:
            problem = str(error)
        except Exception as error:  # whatever its objects' own pickling raises
            problem = f"the batch source cannot be sent to the other ranks: {error}"
    data, problem = world.broadcast([None if problem else data, problem])
    if problem:
        raise ConfigError(problem)
    if data is None or world.rank == 0:
        return source if world.rank == 0 else None
    if not isinstance(world, (MpiWorld, TcpWorld)):
        raise CommError("a batch source is taken from ranks of the same launcher or with the job's secret alone")
    return _cloudpickle().loads(data)


def _cloudpickle():
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("a batch source for several ranks needs cloudpickle: pip install 'ckdist[train]'") from None
    return cloudpickle
