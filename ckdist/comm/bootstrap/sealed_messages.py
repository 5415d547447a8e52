"""Encryption of messages at start-up, and the agreement on a secret that a listener cannot learn."""

import hashlib
import hmac
import secrets

from ckdist import native
from ckdist.comm.world_protocol import World

MOST = 1 << 16  # data bytes of a record
HEAD, EXTRA = 4, 20  # bytes of a record's length, and of all that it has besides the data
KEYS = 32  # bytes of the keys of one connection: to send, and to receive
KEY_BYTES = 32  # of X25519

lib, ffi = native.lib, native.ffi


class SealedMessages:
    """Seals the bytes of one connection, and opens those of its other end (`native/comm/transports/sealer.h`).

    Args:
        keys: KEYS bytes.
    """

    def __init__(self, keys: bytes) -> None:
        self._sealer = native.new(lib.ckdist_sealer_new, keys)

    def seal(self, data: bytes) -> bytes:
        """Returns records with `data`."""
        records = bytearray()
        for begin in range(0, len(data), MOST):
            part = data[begin : begin + MOST]
            record = bytearray(len(part) + EXTRA)
            native.check(lib.ckdist_seal(self._sealer, part, len(part), ffi.from_buffer("uint8_t[]", record)))
            records += record
        return bytes(records)

    def open(self, buffer: bytearray) -> bytes:
        """Removes whole records from the beginning of `buffer` and returns their data.

        Raises:
            ValueError: The peer did not seal them.
        """
        found = bytearray()
        while len(buffer) >= HEAD:
            size = int.from_bytes(buffer[:HEAD], "little")
            if not 1 <= size <= MOST:
                raise ValueError("it sent bytes that are not sealed with the keys of this job")
            if len(buffer) < size + EXTRA:
                break
            data = bytearray(size)
            out = ffi.from_buffer("uint8_t[]", data)
            if lib.ckdist_unseal(self._sealer, bytes(buffer[: size + EXTRA]), size + EXTRA, out) < 0:
                raise ValueError("it sent bytes that are not sealed with the keys of this job")
            del buffer[: size + EXTRA]
            found += data
        return bytes(found)


def agreed_secret(world: World) -> bytes:
    """Returns a new secret of 32 bytes that all ranks know, and that a listener does not learn. A collective call.

    Rank 0 draws it and encrypts it for each rank with the key that the two agree on (X25519).
    """
    private, public = bytearray(KEY_BYTES), bytearray(KEY_BYTES)
    native.check(lib.ckdist_new_key_pair(ffi.from_buffer("uint8_t[]", private), ffi.from_buffer("uint8_t[]", public)))
    publics = [bytes(key) for key in world.gather(bytes(public))]
    own = bytes(private)
    if world.rank == 0:
        secret = secrets.token_bytes(KEY_BYTES)
        world.broadcast([_masked(secret, own, publics[0], key, key) for key in publics])
        return secret
    return _masked(world.broadcast()[world.rank], own, publics[0], publics[world.rank], publics[0])


def _masked(text: bytes, private: bytes, first: bytes, second: bytes, peer: bytes) -> bytes:
    """Encrypts or decrypts 32 bytes with the key of two ranks, which is used once."""
    shared = bytearray(KEY_BYTES)
    native.check(lib.ckdist_agreed_key(private, peer, ffi.from_buffer("uint8_t[]", shared)))
    mask = hmac.digest(bytes(shared), b"ckdist job secret" + first + second, hashlib.sha256)
    return bytes(a ^ b for a, b in zip(text, mask, strict=True))
