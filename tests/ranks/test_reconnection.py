"""Connections between two hosts that are reset while both ranks live are made again; nothing is lost or repeated."""

import contextlib
import ctypes
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import threading
import time

import numpy as np
import pytest

from ckdist import native
from ckdist.comm.bootstrap.handshake import Purpose, connect
from ckdist.comm.bootstrap.sealed_messages import SealedMessages
from ckdist.comm.communicator import open_communicator
from ckdist.comm.transports import opening, reconnection
from ckdist.errors import CommError
from tests.support.thread_ranks import run_threads

CUTS = 10
SO_ATTACH_FILTER = 26  # of Linux


def established() -> set[str]:
    """Local ports of this process's connections over loopback."""
    lines = subprocess.run(["ss", "-tnpHO", "state", "established"], capture_output=True, text=True).stdout.splitlines()
    found = (re.search(r"127\.0\.0\.1:(\d+)\s", line) for line in lines if f"pid={os.getpid()}," in line)
    return {match.group(1) for match in found if match}


def reset(port: str) -> None:
    """Both ends of the connection get a reset. The kernel drops the bytes that it has not sent."""
    subprocess.run(["ss", "-K", "src", "127.0.0.1", "sport", "=", port], capture_output=True)


@pytest.fixture
def before():
    if os.geteuid() or not shutil.which("ss"):
        pytest.skip("resets need root and ss")
    return established()


def all_sums(world, count: int, after=lambda number: None, encrypt: str = "auto", timeout: float = 8) -> None:
    world.encrypt = encrypt
    communicator = open_communicator(world, "tcp", timeout=timeout)
    drawn = np.random.default_rng(1).integers(-9, 9, (1 << 20) + count).astype(np.float32)
    for number in range(count):
        x = drawn[number:][: (1 << 20) if number % 2 else 1000]  # of each sum other numbers
        total = communicator.all_reduce(x * (world.rank + 1))
        assert np.array_equal(total, x * (world.size * (world.size + 1) // 2))
        if world.rank == 0:
            after(number)
    communicator.close()


@pytest.mark.parametrize("encrypt", ["auto", "never"])
def test_resets_lose_nothing(before, encrypt, caplog):
    """Data and heartbeats of three ranks, at any moment of 40 sums."""
    done = threading.Event()

    def reset_all() -> None:
        for _ in range(CUTS):
            for port in sorted(established() - before):
                reset(port)
            if done.wait(0.05):
                break

    def after(number: int) -> None:
        if number == 2:
            threading.Thread(target=reset_all, daemon=True).start()

    with caplog.at_level(logging.WARNING):
        run_threads("aab", lambda world: all_sums(world, 40, after, encrypt))
    done.set()
    assert "rank 0 (on a) broke; it is back after" in caplog.text and "not back" not in caplog.text


@pytest.fixture
def drop(monkeypatch):
    """Makes both ends of the data's connections drop all packets, as a firewall does. Heartbeats pass."""
    opened, real = [], opening.connect_ranks

    def connect_ranks(*args, **more):
        found = real(*args, **more)
        opened.extend(number for number in found[0].descriptors if number >= 0)
        return found

    def drop_all() -> None:
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))  # BPF_RET with length 0
        for descriptor in opened:
            with socket.socket(fileno=os.dup(descriptor)) as one:
                one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))

    monkeypatch.setattr(opening, "connect_ranks", connect_ranks)
    return drop_all


def test_a_dropped_connection_is_replaced(drop, caplog):
    with caplog.at_level(logging.WARNING):
        run_threads("ab", lambda world: all_sums(world, 8, lambda number: drop() if number == 3 else None))
    assert caplog.text.count("rank 0 (on a) broke; it is back after") == 1


def test_an_idle_connection_that_is_dropped_is_replaced(drop):
    """Its last acknowledgement is old, which does not mean that the path loses large packets."""
    dropped = threading.Barrier(2)

    def body(world):
        communicator = open_communicator(world, "tcp", timeout=5)
        communicator.barrier()
        time.sleep(2.6)
        if dropped.wait(5) == 0:
            drop()
        dropped.wait(5)
        assert communicator.all_reduce(np.ones(1 << 18, np.float32)).sum() == 2 << 18
        communicator.close()

    run_threads("ab", body)


def test_a_reset_during_the_last_message_loses_nothing(before, drop):
    message, is_sent = np.arange(1000, dtype=np.float32), threading.Event()

    def body(world):
        communicator = open_communicator(world, "tcp", timeout=8)
        communicator.barrier()
        ports = established() - before
        if world.rank == 0:
            drop()
            communicator.send(message, 1)
            is_sent.set()
        else:
            assert is_sent.wait(5)
            time.sleep(0.1)
            for port in ports:
                reset(port)
            assert np.array_equal(communicator.recv(np.zeros_like(message), 0), message)
        communicator.close()

    run_threads("ab", body)


@pytest.fixture
def listeners(monkeypatch):
    """The listeners of a job's ranks."""
    found, real = {}, reconnection.Reconnection.__init__

    def made(self, world, transport, listener, *more):
        found[world.rank] = listener
        real(self, world, transport, listener, *more)

    monkeypatch.setattr(reconnection.Reconnection, "__init__", made)
    return found


def resumes(listener, secret: bytes, data) -> None:
    """Connects as rank 1 would, and sends `data` of its keys as the number of received bytes."""
    with contextlib.suppress(CommError, OSError):
        joined = connect(listener.address, Purpose(b"back", 1, 0), secret, 2, sealed=True, once=True)
        with joined.socket:
            joined.socket.sendall(data(SealedMessages(joined.keys)))
            joined.socket.settimeout(2)
            while joined.socket.recv(100):
                pass


def test_strangers_and_wrong_numbers_resume_nothing(listeners):
    """A stranger without the secret changes nothing. A wrong number with it is refused, and the ranks meet again."""

    def after(number: int) -> None:
        listener = listeners[0]
        if number % 4 == 1:
            resumes(listener, b"s" * 32, lambda messages: messages.seal((5).to_bytes(8, "big")))
        if number % 4 == 3:
            resumes(listener, listener.secret, lambda messages: messages.seal((1 << 63 | number).to_bytes(8, "big")))
            resumes(listener, listener.secret, lambda messages: b"x" * 28)
            resumes(listener, listener.secret, lambda messages: messages.seal(b"short"))

    run_threads("ab", lambda world: all_sums(world, 8, after))


@pytest.mark.parametrize("has_ended", [True, False])
def test_a_peer_that_is_gone_is_named(listeners, has_ended, monkeypatch):
    """At once if its listener is gone with it, else after the time limit."""
    monkeypatch.setattr(reconnection, "SHARE", 0.3)
    seconds = []

    def body(world):
        communicator = open_communicator(world, "tcp", timeout=4)
        communicator.barrier()
        if world.rank == 1:
            if not has_ended:  # something takes connections there, and says nothing
                listeners[1].close()
                address = listeners[1].address
                silent.append(socket.create_server(address))
            native.ffi.release(communicator.handle)
            communicator._handle = None
            return
        begun = time.monotonic()
        with pytest.raises(CommError, match=r"rank 1 \(on b\) (closed the connection|does not answer)"):
            communicator.all_reduce(np.ones(1000, np.float32))
        seconds.append(time.monotonic() - begun)

    silent = []
    run_threads("ab", body)
    for server in silent:
        server.close()
    assert seconds[0] < 1 if has_ended else 1 < seconds[0] < 4
