"""Somebody between two hosts changes, repeats, reorders, cuts or inserts bytes: the job ends with a line that names the
link, and no wrong value is computed.
"""

import contextlib
import itertools
import logging
import socket
import threading
import time

import numpy as np
import pytest

from ckdist.comm.bootstrap import sockets
from ckdist.comm.bootstrap.handshake import Joined, job_secret
from ckdist.comm.bootstrap.sockets import DATA
from ckdist.comm.communicator import open_communicator
from ckdist.errors import CommError, ConfigError
from tests.support.thread_ranks import run_threads

AFTER = 2_000_000  # bytes that pass unchanged


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE = {
    "flipped": flipped,
    "repeated": lambda data: data + data,
    "left out": lambda data: data[:-7],
    "reordered": lambda data: data[len(data) // 2 :] + data[: len(data) // 2],
    "inserted": lambda data: data + b"0123456789abcdef" * 4,
}


class Relay:
    """Passes bytes between two sockets and damages them once, in one direction."""

    def __init__(self, near: socket.socket, far: socket.socket, change, always=lambda data: data):
        self.always, self.change, self.passed, self.seen = always, change, 0, bytearray()
        self.threads = [
            threading.Thread(target=self.run, args=ends, daemon=True) for ends in ((near, far), (far, near))
        ]
        for thread in self.threads:
            thread.start()

    def run(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.passed += len(data)
                self.seen += data
                if self.change is not None and self.passed > AFTER:
                    change, self.change = self.change, None
                    data = change(data)
                target.sendall(self.always(data))
            target.shutdown(socket.SHUT_WR)


@pytest.fixture
def relayed(monkeypatch):
    """Puts a relay into the data connection of the job's two ranks."""
    relays, real = [], sockets.connect

    def using(change, *always):
        def connect(address, purpose, *arguments):
            joined = real(address, purpose, *arguments)
            if purpose.kind != DATA:
                return joined
            near, there = socket.socketpair()
            relays.append(Relay(there, joined.socket, change, *always))
            return Joined(near, joined.keys)

        monkeypatch.setattr(sockets, "connect", connect)
        monkeypatch.setattr(sockets, "check_packet_sizes", lambda *_: None)
        return relays

    return using


def sums(encrypt: str, elements: int = 1 << 20):
    """Sums 4 MB at a time on two hosts. Returns what each rank computed before its error, and the errors."""
    found, errors = [0, 0], [None, None]

    def body(world):
        world.encrypt = encrypt
        try:
            communicator = open_communicator(world, "tcp", timeout=3)
            for _ in range(8):
                data = np.full(elements, world.rank + 1, np.float32)
                data = communicator.all_reduce(data)
                assert np.all(data == 3)
                found[world.rank] += 1
            communicator.close()
        except CommError as error:
            errors[world.rank] = str(error)

    run_threads("ab", body)
    return found, errors


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_stranger_between_two_hosts(relayed, damage):
    relayed(DAMAGE[damage])
    found, errors = sums("auto")
    assert all(errors) and max(found) < 8
    assert any("not sealed with the keys of this job" in error for error in errors), errors
    assert errors[0].startswith("rank 1 (on b) ") or errors[1].startswith("rank 0 (on a) ")


@pytest.mark.parametrize("encrypt", ["auto", "never"])
def test_values_are_not_on_the_wire(relayed, encrypt, caplog):
    """A line says if they are."""
    relays = relayed(None)
    with caplog.at_level(logging.INFO):
        assert sums(encrypt) == ([8, 8], [None, None])
    assert ("nothing is encrypted (--encrypt never)" in caplog.text) == (encrypt == "never")
    plain = np.full(64, 2, np.float32).tobytes()
    assert (plain in relays[0].seen) == (encrypt == "never")


def test_a_slow_link_that_loses_packets(relayed):
    """50 ms each way, and 0.2 s more for one piece of a hundred, as if TCP had sent it again: sums stay right."""
    pieces = itertools.count(1)

    def late(data: bytes) -> bytes:
        time.sleep(0.05 + 0.2 * (next(pieces) % 100 == 0))
        return data

    relays = relayed(None, late)
    assert sums("auto", 1 << 14) == ([8, 8], [None, None])
    assert relays and next(pieces) > 16


@pytest.mark.parametrize("transport", ["mpi", "verbs"], ids=["over_mpi", "over_verbs"])
def test_a_sealed_job_refuses_other_transports(transport):
    def body(world):
        world.encrypt = "always"
        with pytest.raises(ConfigError, match=f"--transport {transport} encrypts nothing, and --encrypt is always"):
            open_communicator(world, transport, timeout=3)

    run_threads("ab", body)


def test_ranks_agree_on_a_secret_that_is_not_in_their_messages():
    said = []

    def body(world):
        gather = world.gather
        world.gather = lambda value: said.append(value) or gather(value)
        return job_secret(world), job_secret(world)

    secrets = run_threads("abb", body)
    assert len(set(secrets)) == 1 and len(set(secrets[0])) == 2
    told = b"".join(part for value in said if value for part in (value if isinstance(value, list) else [value]))
    assert all(secret not in told for secret in secrets[0])
