"""The process manager of ranks that no launcher of MPI has started."""

import os
import socket
import threading
from contextlib import contextmanager
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from varcomm.errors import LaunchError
from varcomm.transport.environment import Place
from varcomm.transport.mpi.pmi import Server
from varcomm.transport.mpi.start import _process_manager


class Rank:
    """What a rank sends and receives, line by line."""

    def __init__(self, port, *lines):
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=20)
        self._file = self._connection.makefile("rw")
        self.say(*lines)

    def say(self, *lines):
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()

    def ask(self, line):
        self.say(line)
        return self.hear()

    def hear(self):
        return self._file.readline().rstrip("\n")

    def leave(self):
        self._file.close()
        self._connection.close()


@contextmanager
def served(size, limit=20.0):
    """The port of a server of `size` ranks, which has ended after this block."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = threading.Thread(target=Server(listener, size, "job", limit).serve, daemon=True)
    server.start()
    yield listener.getsockname()[1]
    server.join(10)
    assert not server.is_alive()
    listener.close()


def test_ranks_start_together_and_share_a_table():
    with served(2) as port:
        first, second = Rank(port, "job"), Rank(port, "job")
        assert [first.hear(), second.hear()] == ["", ""]
        answer = first.ask("cmd=init pmi_version=1 pmi_subversion=1")
        assert answer == "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0"
        assert first.ask("cmd=get_universe_size") == "cmd=universe_size size=2 rc=0"
        assert first.ask("cmd=get_my_kvsname") == "cmd=my_kvsname kvsname=job rc=0"
        value = "a=b c"
        assert first.ask(f"cmd=put kvsname=job key=k value={value}").startswith(
            "cmd=put_result rc=0"
        )
        first.say("cmd=barrier_in")
        assert second.ask("cmd=barrier_in") == first.hear() == "cmd=barrier_out rc=0"
        assert second.ask("cmd=get kvsname=job key=k").endswith(f" rc=0 msg=success value={value}")
        assert "rc=-1" in second.ask("cmd=get kvsname=job key=unknown")
        assert second.ask("cmd=spawn") == "cmd=spawn_result rc=-1 msg=unknown"
        for rank in first, second:
            assert rank.ask("cmd=finalize") == "cmd=finalize_ack rc=0"
            rank.leave()


def test_strangers_are_sent_away():
    with served(1) as port:
        stranger = Rank(port, "GET / HTTP/1.1")
        assert stranger.hear() == ""
        stranger.leave()
        rank, late = Rank(port, "job"), Rank(port)
        assert rank.ask("cmd=get_appnum") == ""  # the line that lets it start
        assert rank.hear() == "cmd=appnum appnum=0 rc=0"
        assert late.ask("job") == ""
        rank.leave()
        late.leave()


def test_rank_that_dies_is_told_to_who_waits_for_it():
    with served(3) as port:
        ranks = [Rank(port, "job") for _ in range(3)]
        assert [rank.hear() for rank in ranks] == [""] * 3
        ranks[0].say("cmd=barrier_in")
        ranks[1].leave()
        died = "cmd=barrier_out rc=-1 msg=a_rank_has_died"
        assert ranks[0].hear() == died
        assert ranks[2].ask("cmd=barrier_in") == died
        ranks[0].leave()
        ranks[2].leave()


def place(rank, size=2):
    return Place(rank, size, rank, "file:///nowhere", "varcomm.launch")


@pytest.mark.parametrize("limit", [0.3, 20.0])
def test_rank_that_does_not_come_is_not_waited_for(limit):
    """With the longer limit, another one comes and dies at once."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))

    def come():
        port, name = store.get("varcomm/pmi").decode().split()
        Rank(int(port), name).leave() if limit > 1 else None

    other = threading.Thread(target=come)
    other.start()
    with pytest.raises(LaunchError, match=r"rank 0 of 3 cannot start MPI: another rank has ended"):
        _process_manager(place(0, 3), store, timedelta(seconds=limit))
    other.join()


def test_manager_that_cannot_be_reached_is_told():
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    store.set("varcomm/pmi", f"{port} name")
    with pytest.raises(LaunchError, match=rf"rank 1 of 2 cannot reach 127.0.0.1:{port}"):
        _process_manager(place(1), store, timedelta(seconds=5))


def test_what_mpi_is_told():
    store = HashStore()
    told = []
    threads = [
        threading.Thread(
            target=lambda rank=rank: told.append(
                _process_manager(place(rank), store, timedelta(seconds=20))
            )
        )
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted((one["PMI_RANK"], one["PMI_SIZE"]) for one in told) == [("0", "2"), ("1", "2")]
    for one in told:
        connection = socket.socket(fileno=int(one["PMI_FD"]))
        assert connection.gettimeout() is None
        assert os.get_blocking(connection.fileno())
        connection.close()
