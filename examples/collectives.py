"""The communicator alone: sums, gathers, messages, and one-sided memory access (put and get).

    ckdist launch -n 3 python examples/collectives.py

It also runs under `mpirun -n 3`, and over hosts (`ckdist launch --hosts ...`).
"""

import numpy as np

from ckdist.comm.communicator import open_communicator
from ckdist.comm.world import start_world


def main() -> None:
    world = start_world()
    comm = open_communicator(world)
    rank, size = comm.rank, comm.size

    # Sums have the same bits on every rank, transport and run.
    total = comm.all_reduce(np.full(4, rank + 0.5, np.float32))
    parts = comm.all_gather(np.array([rank * rank]))
    share = comm.reduce_scatter(np.arange(2 * size, dtype=np.float32))  # this rank's two elements of the sum
    swapped = comm.all_to_all(np.array([10 * rank + to for to in range(size)]))

    # Sends to the right while the message from the left arrives.
    arriving = comm.irecv(np.empty(1, np.int64), (rank - 1) % size)
    comm.send(np.array([rank]), (rank + 1) % size)
    left = arriving.wait()

    # Each rank writes into its right neighbour's memory and notifies it. No receive is needed.
    shelf = comm.allocate(8, np.int64)
    shelf[:] = 0
    window = comm.window(shelf)
    window.put(np.array([rank, rank + 100]), (rank + 1) % size, offset=16).wait()
    window.notify((rank + 1) % size).wait()
    window.wait(1)
    written = shelf[2:4].tolist()
    comm.barrier()
    read = window.get(np.empty(2, np.int64), (rank + 1) % size, offset=16).wait()  # this rank's own data
    comm.barrier()  # no rank closes while its memory is read

    lines = [
        f"all_reduce {total.tolist()}  all_gather {parts.tolist()}",
        f"reduce_scatter {share.tolist()}  all_to_all {swapped.tolist()}",
        f"from the left {left.tolist()}  put to me {written}  got back {read.tolist()}",
    ]
    print("\n".join(lines), flush=True)
    comm.close()
    world.close()


if __name__ == "__main__":
    main()
