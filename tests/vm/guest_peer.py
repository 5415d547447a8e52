"""Guest program: rank 1 of two on rxe1, in pyverbs and the standard library alone, written from the comments of
comm/transports/verbs_frames.h.

It shares no code with the project, so what both sides get wrong in the same way would show here. Started by
guest_rank.py.
"""

import ipaddress
import os
import socket
import struct
import sys
import time

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

HOST, PAIR, FRAME = struct.Struct("<8sIIHBBI16s"), struct.Struct("<QIIII"), struct.Struct("<IIiIIIQq")
MESSAGE, OFFER, ACCEPT, ARRIVED, WINDOW, NOTIFY, CREDITS, GOODBYE = range(1, 9)
SLOT, SLOTS = 8192, 64
SILENCE = 120  # seconds without a completion
ACCESS = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
OUTBOX, BUFFER = SLOT * SLOTS, 2 * SLOT * SLOTS  # after the inbox; where frames leave from; data


def pattern(count, seed):
    # made at once: rank 0 waits for it, on a machine that is slow
    period = bytes((i * (2 * seed + 1) + seed) % 253 for i in range(253))
    return (period * (count // 253 + 1))[:count]


class Peer:
    def __init__(self, device, address, stream):
        self.stream, self.end = stream, time.monotonic() + SILENCE
        context = Context(name=device)
        mapped = "::ffff:" + address
        self.index = next(i for i in range(16) if self.same(context.query_gid(1, i), mapped))
        self.gid = socket.inet_pton(socket.AF_INET6, str(context.query_gid(1, self.index)))
        self.domain = PD(context)
        self.memory = MR(self.domain, BUFFER + (1 << 20), ACCESS)
        self.memory.write(b"\0" * (1 << 20), 1 << 20, BUFFER)
        self.queue = CQ(context, 512)
        cap = QPCap(max_send_wr=128, max_recv_wr=SLOTS, max_send_sge=1, max_recv_sge=1)
        self.pair = QP(
            self.domain, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.queue, rcq=self.queue, cap=cap, sq_sig_all=1)
        )
        attributes = QPAttr(port_num=1)
        attributes.qp_access_flags = ACCESS
        self.pair.to_init(attributes)
        for _ in range(SLOTS):
            self.pair.post_recv(self.receive())
        self.sent = self.received = self.owed = self.done = 0
        self.credits = SLOTS
        self.frames = []
        self.connect(context)

    def receive(self):
        return RecvWR(**self.data(0, 8))  # pyverbs wants memory for it; a write with immediate leaves it alone

    @staticmethod
    def same(gid, address):
        return socket.inet_pton(socket.AF_INET6, str(gid)) == socket.inet_pton(socket.AF_INET6, address)

    def swap(self, data):
        self.stream.sendall(len(data).to_bytes(4, "little") + data)
        self.stream.settimeout(SILENCE)
        size = int.from_bytes(self.stream.recv(4, socket.MSG_WAITALL), "little")
        return self.stream.recv(size, socket.MSG_WAITALL) if size else b""

    def connect(self, context):
        host = HOST.pack(b"ckverbs1", SLOTS, SLOT, 0, context.query_port(1).active_mtu, 1, 8, self.gid)
        pair = PAIR.pack(self.memory.buf, self.memory.rkey, self.pair.qp_num, 4711, 0)
        other = self.swap(host + pair + PAIR.pack(0, 0, 0, 0, 0))
        magic, slots, slot, _, mtu, ethernet, _, gid = HOST.unpack_from(other)
        assert (magic, slots, slot, ethernet) == (b"ckverbs1", SLOTS, SLOT, 1)
        self.ring, self.ring_key, number, sequence, _ = PAIR.unpack_from(other, HOST.size + PAIR.size)
        attributes = QPAttr(port_num=1)
        attributes.dest_qp_num, attributes.rq_psn, attributes.path_mtu = number, sequence, mtu
        attributes.max_dest_rd_atomic, attributes.min_rnr_timer = 8, 12
        route = GlobalRoute(dgid=GID(ipaddress.IPv6Address(gid).exploded), sgid_index=self.index, hop_limit=64)
        attributes.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
        self.pair.to_rtr(attributes)
        attributes.sq_psn, attributes.timeout, attributes.retry_cnt, attributes.rnr_retry, attributes.max_rd_atomic = (
            4711,
            16,
            6,
            0,
            1,
        )
        self.pair.to_rts(attributes)
        self.swap(b"")

    def poll(self):
        assert time.monotonic() < self.end, "nothing happened for too long"
        count, entries = self.queue.poll(16)
        if count:
            self.end = time.monotonic() + SILENCE
        else:
            os.sched_yield()
        for entry in entries[:count]:
            assert entry.status == e.IBV_WC_SUCCESS, f"completion status {entry.status}"
            if entry.opcode == e.IBV_WC_RECV_RDMA_WITH_IMM:
                self.take(entry)
            else:
                self.done += 1

    def take(self, entry):
        at = SLOT * (self.received % SLOTS)
        frame = FRAME.unpack(self.memory.read(FRAME.size, at))
        bytes_behind = entry.byte_len - FRAME.size
        self.frames.append((frame, self.memory.read(bytes_behind, at + FRAME.size) if bytes_behind else b""))
        self.pair.post_recv(self.receive())
        self.received += 1
        self.owed += 1
        self.credits += frame[1]

    def write(self, request, remote, key, awaited=True):
        request.set_wr_rdma(key, remote)
        target = self.done + 1
        self.pair.post_send(request)
        while awaited and self.done < target:
            self.poll()

    def data(self, offset, count):
        return {"num_sge": 1, "sg": [SGE(self.memory.buf + offset, count, self.memory.lkey)]}

    def send(self, kind, tag=0, id=0, answer=0, key=0, address=0, size=0, behind=b"", lie=0):
        while self.credits < 2:
            self.poll()
        slot = self.sent % SLOTS
        frame = FRAME.pack(kind, self.owed, tag, id, answer, key, address, size or len(behind)) + behind
        self.memory.write(frame, len(frame), OUTBOX + SLOT * slot)
        self.sent, self.credits, self.owed = self.sent + 1, self.credits - 1, 0
        request = SendWR(
            opcode=e.IBV_WR_RDMA_WRITE_WITH_IMM,
            imm_data=socket.htonl(slot + lie),
            **self.data(OUTBOX + SLOT * slot, len(frame)),
        )
        # who reads a lie hangs up, perhaps before its device acknowledges it
        self.write(request, self.ring + SLOT * slot, self.ring_key, awaited=not lie)

    def put(self, offset, data, remote, key):
        self.memory.write(data, len(data), offset)
        self.write(SendWR(opcode=e.IBV_WR_RDMA_WRITE, **self.data(offset, len(data))), remote, key)

    def get(self, offset, count, remote, key):
        self.write(SendWR(opcode=e.IBV_WR_RDMA_READ, **self.data(offset, count)), remote, key)
        return self.memory.read(count, offset)

    def await_frame(self, kind):
        """(tag, id, answer, key, address, bytes, what follows) of the next frame of a kind."""
        while True:
            for i, (frame, behind) in enumerate(self.frames):
                if frame[0] == kind:
                    del self.frames[i]
                    return (*frame[2:], behind)
            self.poll()


def main():
    peer = Peer("rxe1", "10.9.0.2", socket.socket(fileno=int(sys.argv[1])))
    peer.send(MESSAGE, tag=3, behind=pattern(100, 0))
    tag, *_, behind = peer.await_frame(MESSAGE)
    assert tag == 4 and behind == pattern(100, 0)[::-1], "a short message"

    peer.send(OFFER, tag=3, id=99, size=300_000)
    _, id, answer, key, address, size, _ = peer.await_frame(ACCEPT)
    assert (id, size) == (99, 300_000)
    peer.put(BUFFER, pattern(300_000, 1), address, key)
    peer.send(ARRIVED, id=answer)

    tag, id, _, _, _, size, _ = peer.await_frame(OFFER)
    assert (tag, size) == (4, 100_000)
    peer.send(ACCEPT, id=id, answer=7, key=peer.memory.rkey, address=peer.memory.buf + BUFFER, size=size)
    assert peer.await_frame(ARRIVED)[1] == 7
    assert peer.memory.read(size, BUFFER) == pattern(size, 2), "a long message"

    window, times, _, key, address, size, _ = peer.await_frame(WINDOW)
    assert (window, times, size) == (1, 1, 1 << 16)
    assert peer.get(BUFFER, size, address, key) == pattern(size, 3), "a get"
    peer.put(BUFFER, pattern(50_000, 4), address + 1000, key)
    peer.send(NOTIFY, tag=1, id=6)
    peer.send(NOTIFY, tag=1, id=6)

    for i in range(200):  # three times the credits
        peer.send(MESSAGE, tag=5, behind=bytes([i]) * 9)
    peer.memory.write(b"\0" * 10_000, 10_000, BUFFER)
    peer.send(WINDOW, tag=1, id=1, key=peer.memory.rkey, address=peer.memory.buf + BUFFER, size=10_000)
    tag, slot, *_ = peer.await_frame(NOTIFY)
    assert (tag, slot) == (1, 8)
    assert peer.memory.read(10_000, BUFFER) == b"\0" * 70 + pattern(5000, 5) + b"\0" * 4930, "a put"
    peer.await_frame(MESSAGE)

    peer.send(CREDITS, lie=1)  # a slot that is not its turn
    time.sleep(2)
    print("the stranger is content", flush=True)


main()
