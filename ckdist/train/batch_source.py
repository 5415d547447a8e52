"""A user's own source of batches, on every rank of the job.

A function that a script on rank 0 defines is sent by cloudpickle, which can run any code. So it is sent only over the
job's own world, and an HMAC-SHA256 is checked before unpickling. The HMAC's key is derived from the job's secret and
fresh nonces of all ranks. So neither altered data nor data of an earlier job is accepted.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable
from typing import Any, TypeAlias

from ckdist.comm.bootstrap.handshake import job_secret
from ckdist.comm.bootstrap.star_world import StarWorld
from ckdist.comm.mpi_world import MpiWorld
from ckdist.comm.world_protocol import World
from ckdist.errors import CommError, ConfigError
from ckdist.train.batch import PackedBatch

MAX_BYTES = 32 << 20
NONCE_BYTES = 32

BatchSource: TypeAlias = Callable[[int, int, int], list[PackedBatch]]  # step, rank, size


def share_source(world: World, source: BatchSource | None, zero_stage: int = 0) -> BatchSource | None:
    """Returns rank 0's source, or None, on every rank. A collective call.

    Raises ConfigError if passes exchange gradients or weights: replicas may have different numbers of batches.
    """
    if world.size == 1:
        return source
    if not world.broadcast(source is not None):
        return None
    if zero_stage > 1:
        raise ConfigError(f"zero_stage ({zero_stage}) must be at most 1 with a batch source: set zero_stage to 1")
    if not isinstance(world, (MpiWorld, StarWorld)):
        raise CommError("a batch source can be shared only by ranks of one launcher, or with a job secret")
    key, data, problem = _key(world), None, None
    if world.rank == 0:
        try:
            data = _cloudpickle().dumps(source)
            if len(data) > MAX_BYTES:
                problem = (
                    f"the batch source takes {len(data)} bytes, and at most {MAX_BYTES} are sent to the ranks: "
                    "open its data inside the function"
                )
        except ConfigError as error:
            problem = str(error)
        except Exception as error:  # pickling calls code of its objects, which may raise anything
            problem = f"the batch source cannot be sent to the other ranks: {error}"
    data, code, problem = world.broadcast(
        [None, None, problem] if data is None or problem else [data, _code(key, data), None]
    )
    if problem:
        raise ConfigError(str(problem))
    if world.rank == 0:
        return source
    if not isinstance(data, bytes) or not isinstance(code, bytes) or not hmac.compare_digest(code, _code(key, data)):
        raise CommError(
            "the batch source was changed on its way from rank 0, so it is not unpickled: "
            "someone tampers with the traffic between the hosts"
        )
    return _cloudpickle().loads(data)


def _key(world: World) -> bytes:
    """The key of this job's code, on every rank. A collective call."""
    own = secrets.token_bytes(NONCE_BYTES)
    nonces = world.gather(own)
    if nonces[world.rank] != own or not all(isinstance(nonce, bytes) and len(nonce) == NONCE_BYTES for nonce in nonces):
        raise CommError(
            "the nonces of the ranks were changed on their way: someone tampers with the traffic between the hosts"
        )
    return hmac.digest(job_secret(world), b"ckdist batch source" + b"".join(nonces), hashlib.sha256)


def _code(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)


def _cloudpickle() -> Any:
    """The module. Raises ConfigError if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        raise ConfigError("a batch source for several ranks needs cloudpickle: pip install 'ckdist[train]'") from None
    return cloudpickle
