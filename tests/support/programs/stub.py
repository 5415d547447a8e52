"""`python -ISE stub.py SOCKET words…`: the program that another process starts for this one.

It sends its words, folder, environment and streams to SOCKET (`tests/support/stubs.py`), then the signals that it gets,
and ends as the program ends. It imports next to nothing, so that it starts in a tenth of the time.
"""

import _signal
import _socket
import marshal
import os
import sys

connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
connection.connect(sys.argv[1])
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in range(3))
request = marshal.dumps((sys.argv[2:], os.getcwd(), dict(os.environ)))
for number in (_signal.SIGHUP, _signal.SIGINT, _signal.SIGTERM, _signal.SIGUSR1, _signal.SIGUSR2):
    _signal.signal(number, lambda number, _: connection.send(b"%d" % number))
connection.sendmsg([request], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)])
code = int(connection.recv(16))
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if -code != _signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
