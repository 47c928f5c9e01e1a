"""A process manager for ranks of MPI that no MPI launcher has started.

When an MPI library starts, it asks a process manager which rank it is and where the others are.
Under ``mpiexec`` that is its daemon; under torchrun there is none. This program is one for a single
job: every rank connects, and the library of the rank goes on over that connection in version 1 of
the protocol PMI, lines of text by which ranks put values into a common table, meet in a barrier,
and get the values of the others. [1]_

It runs as a process of its own: while MPI starts, a rank runs no Python. It imports nothing but
the standard library, so that it starts in a moment, and it ends with the last rank, however that
ends. Only when all ranks have come does it let them start MPI, where they could wait for each other
without an end. A rank that leaves without a farewell ends the connections of all.

.. [1] P. Balaji et al., "PMI: A Scalable Parallel Process-Management Interface for Extreme-Scale
   Systems", EuroMPI 2010.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys
import time
from contextlib import suppress

__all__ = ["Server"]


class Server:
    """What the ranks have told so far, and who is still there.

    Parameters
    ----------
    listener : socket.socket
        To which the ranks connect.
    size : int
        How many ranks there are.
    name : str
        Of the job, known to its ranks alone: each connection begins with it, as a line. Others are
        closed.
    limit : float
        Seconds after which those that have come are sent away unless all have.
    """

    def __init__(self, listener: socket.socket, size: int, name: str, limit: float) -> None:
        self._listener = listener
        self._size = size
        self._name = name
        self._deadline = time.monotonic() + limit
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._unread: dict[socket.socket, str] = {}  # of all connections
        self._ranks: set[socket.socket] = set()  # those that knew the name
        self._done: set[socket.socket] = set()  # those that said farewell
        self._waiting: list[socket.socket] = []  # in the barrier
        self._started = False
        self._died = False  # one of them has
        self._values: dict[str, str] = {}

    def serve(self) -> None:
        """Serve the ranks until all have ended, or until not all can start."""
        while not self._started or self._ranks:
            left = None if self._started else max(0.0, self._deadline - time.monotonic())
            events = self._selector.select(left)
            if not events:
                return  # not all have come in time
            for key, _ in events:
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._listener:
                    self._accept()
                elif not self._read(connection):
                    if not self._started:
                        return
                    self._died = True
                    self._leave_barrier()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        # a host that is switched off says nothing
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._selector.register(connection, selectors.EVENT_READ)
        self._unread[connection] = ""

    def _read(self, connection: socket.socket) -> bool:
        """Answer what has come from one connection; tell whether the job can go on."""
        received = b""
        with suppress(ConnectionError):
            received = connection.recv(65536)
        if not received:
            return self._close(connection)
        text = self._unread[connection] + received.decode("ascii", "replace")
        *lines, self._unread[connection] = text.split("\n")
        for line in lines:
            if connection in self._ranks:
                self._answer(connection, line)
            elif line == self._name and not self._started:
                self._welcome(connection)
            else:
                return self._close(connection)
        return True

    def _close(self, connection: socket.socket) -> bool:
        well = connection not in self._ranks or connection in self._done
        self._ranks.discard(connection)
        del self._unread[connection]
        self._selector.unregister(connection)
        connection.close()
        return well

    def _welcome(self, connection: socket.socket) -> None:
        self._ranks.add(connection)
        if len(self._ranks) == self._size:
            self._started = True
            for one in self._ranks:
                self._send(one, "")  # an empty line: start

    def _answer(self, connection: socket.socket, line: str) -> None:
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command = words.get("cmd", "")
        if command == "barrier_in":
            self._waiting.append(connection)
            if self._died or len(self._waiting) == self._size:
                self._leave_barrier()
            return
        key = words.get("key", "")
        if command == "put":
            self._values[key] = line.partition(" value=")[2]
        if command == "get" and key in self._values:
            self._send(connection, f"cmd=get_result rc=0 msg=success value={self._values[key]}")
            return
        if command == "finalize":
            self._done.add(connection)
        answers = {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=256 vallen_max=4096 rc=0",
            "get_appnum": "cmd=appnum appnum=0 rc=0",
            # MPICH derives the name of its shared memory from it
            "get_my_kvsname": f"cmd=my_kvsname kvsname={self._name} rc=0",
            "get_universe_size": f"cmd=universe_size size={self._size} rc=0",
            "put": "cmd=put_result rc=0 msg=success",
            "get": "cmd=get_result rc=-1 msg=key_not_found value=unknown",
            "finalize": "cmd=finalize_ack rc=0",
        }
        self._send(connection, answers.get(command, f"cmd={command}_result rc=-1 msg=unknown"))

    def _leave_barrier(self) -> None:
        result = "rc=-1 msg=a_rank_has_died" if self._died else "rc=0"
        for one in self._waiting:
            self._send(one, f"cmd=barrier_out {result}")
        self._waiting = []

    def _send(self, connection: socket.socket, line: str) -> None:
        with suppress(OSError):  # that a rank has ended is told by what comes from it
            connection.sendall(line.encode() + b"\n")


def _main(size: str, limit: str) -> None:
    """Serve those who connect to standard input, from a process that nobody waits for."""
    name = os.environ["VARCOMM_PMI_NAME"]
    if os.fork():
        os._exit(0)
    os.setsid()  # a Ctrl-C in the terminal is for the ranks
    Server(socket.socket(fileno=0), int(size), name, float(limit)).serve()


if __name__ == "__main__":
    _main(*sys.argv[1:])
