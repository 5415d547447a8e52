"""A batch source that travels between ranks is unpickled where its HMAC is rank 0's for this job, nowhere else."""

import hashlib
import hmac
import pathlib

import cloudpickle
import pytest

from ckdist.comm.bootstrap.tcp_world import TcpWorld
from ckdist.errors import CommError
from ckdist.train.batch_source import share_source

SECRET = b"s" * 32


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: pathlib.Path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


class Told(TcpWorld):
    """Rank 1 of two, which is told by `say(nonces)` what rank 0 has sent."""

    has_source = True

    def __init__(self, say, replace_nonce: bool = False):
        self.rank, self.size, self.secret, self.say, self.replace_nonce = 1, 2, SECRET, say, replace_nonce

    def gather(self, value):
        self.nonces = [bytes(32), bytes(32) if self.replace_nonce else value]
        return self.nonces

    def broadcast(self, value=None):
        return self.say(self.nonces) if hasattr(self, "nonces") else self.has_source


def code(secret: bytes, nonces: list[bytes], data: bytes) -> bytes:
    key = hmac.new(secret, b"ckdist batch source" + b"".join(nonces), hashlib.sha256).digest()
    return hmac.new(key, data, hashlib.sha256).digest()


def test_what_rank_0_sent_is_taken():
    data = cloudpickle.dumps(lambda step: step + 1)
    assert share_source(Told(lambda nonces: [data, code(SECRET, nonces, data), None]), None)(1) == 2


def test_nothing_is_sent_where_there_is_no_source():
    told = Told(lambda nonces: pytest.fail("it has asked for more"))
    told.has_source = False
    assert share_source(told, None) is None


@pytest.mark.parametrize("what", ["no code", "another secret", "another job", "changed", "nonces"])
def test_anything_else_is_not_unpickled(what, tmp_path):
    data = cloudpickle.dumps(Touch(tmp_path / "made"))
    say = {
        "no code": lambda nonces: [data, None, None],
        "another secret": lambda nonces: [data, code(b"t" * 32, nonces, data), None],
        "another job": lambda nonces: [data, code(SECRET, [bytes(32), bytes(32)], data), None],
        "changed": lambda nonces: [data, code(SECRET, nonces, data[:-1]), None],
        "nonces": lambda nonces: [data, code(SECRET, nonces, data), None],
    }[what]
    with pytest.raises(CommError, match="someone tampers with the traffic between the hosts"):
        share_source(Told(say, replace_nonce=what == "nonces"), None)
    assert not (tmp_path / "made").exists()
