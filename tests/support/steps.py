"""A replay's view of a communicator without an executable: `Steps`."""

from ckdist import native
from ckdist.comm.communicator import Communicator, open_communicator

lib, ffi = native.lib, native.ffi
ARENA_BYTES = 1 << 26


class Steps:
    """The steps of `communicator`; a collective call. Sizes as in native/api/step_communicator_api.h."""

    def __init__(self, communicator: Communicator, floats=16, rows=1, vocab=1, first_column=0, columns=0, ints=1):
        out = ffi.new("struct ckdist_steps **")
        native.check(lib.ckdist_steps_new(communicator.handle, floats, rows, vocab, first_column, columns, ints, out))
        self.communicator, self.handle = communicator, ffi.gc(out[0], lib.ckdist_steps_free)

    def all_reduce(self, slot: int, floats: int, step: int, chunks: int = 1) -> None:
        native.check(lib.ckdist_steps_all_reduce(self.handle, slot, floats, chunks, step))

    def gather_logits(self, rows: int, step: int) -> None:
        native.check(lib.ckdist_steps_gather_logits(self.handle, rows, step))

    def publish(self, batch) -> None:
        """`batch`: int32, or None for the last."""
        address = ffi.NULL if batch is None else native.pointer(batch, "int32_t *")
        native.check(lib.ckdist_steps_publish(self.handle, address, 0 if batch is None else len(batch)))

    def receive(self) -> list[int]:
        batch, ints = ffi.new("const int32_t **"), ffi.new("int64_t *")
        native.check(lib.ckdist_steps_receive(self.handle, batch, ints))
        return list(batch[0][0 : ints[0]])

    def send(self, x, peer: int, step: int = 0) -> None:
        native.check(lib.ckdist_steps_send(self.handle, peer, native.pointer(x), x.nbytes, step))

    def recv(self, x, peer: int, step: int = 0):
        native.check(lib.ckdist_steps_recv(self.handle, peer, native.pointer(x), x.nbytes, step))
        return x

    def check_peers(self) -> None:
        self.communicator.check_peers()

    def abandon(self, reason: str) -> None:
        self.communicator.abandon(reason)


def open_steps(world, transport: str = "auto", timeout: float = 20.0, spins: int = 20, **sizes) -> Steps:
    """The steps of a communicator of their own."""
    options = {"timeout": timeout, "spins": spins, "arena_bytes": ARENA_BYTES}
    return Steps(open_communicator(world, transport, **options), **sizes)
