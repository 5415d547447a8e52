"""Guest program: memory bound to each node lies there.

Asked of the kernel in two ways: move_pages' query and numa_maps.
"""

import ctypes
import json
import mmap
import os
import re

PAGES = 256
MPOL_BIND, MPOL_INTERLEAVE = 2, 3
libnuma = ctypes.CDLL("libnuma.so.1", use_errno=True)
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def area():
    return libc.mmap(
        None, PAGES * mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )


def bind(address, policy, nodes):
    mask = ctypes.c_ulong(sum(1 << node for node in nodes))
    assert (
        libnuma.mbind(
            ctypes.c_void_p(address),
            ctypes.c_ulong(PAGES * mmap.PAGESIZE),
            policy,
            ctypes.byref(mask),
            ctypes.c_ulong(64),
            0,
        )
        == 0
    )


def touch(address):
    ctypes.memset(address, 1, PAGES * mmap.PAGESIZE)


def asked(address):
    """{node: pages} as move_pages tells."""
    pages = (ctypes.c_void_p * PAGES)(*[address + i * mmap.PAGESIZE for i in range(PAGES)])
    nodes = (ctypes.c_int * PAGES)()
    assert libnuma.move_pages(0, ctypes.c_ulong(PAGES), pages, None, nodes, 0) == 0
    return {node: list(nodes).count(node) for node in set(nodes)}


def listed(address):
    """{node: pages} as numa_maps lists the mapping; what lies beside it with the same policy is in the same line."""
    with open("/proc/self/numa_maps") as maps:
        line = next(line for line in maps if int(line.split()[0], 16) == address)
    return {int(node): int(pages) for node, pages in re.findall(r"N(\d+)=(\d+)", line)}


def main():
    for node in (0, 1):
        address = area()
        bind(address, MPOL_BIND, [node])
        touch(address)
        assert asked(address) == listed(address) == {node: PAGES}, (node, asked(address), listed(address))
    address = area()
    bind(address, MPOL_INTERLEAVE, [0, 1])
    touch(address)
    assert asked(address) == {0: PAGES // 2, 1: PAGES // 2}, asked(address)
    for cpu, node in ((0, 0), (os.cpu_count() - 1, 1)):
        os.sched_setaffinity(0, {cpu})
        address = area()
        touch(address)
        assert asked(address) == {node: PAGES}, (cpu, asked(address))
    with open("/sys/devices/system/node/node0/distance") as file:
        print(json.dumps({"distance": file.read().split()}))


main()
