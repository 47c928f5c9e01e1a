"""Ranks forked from a process that has imported all tests: they start without imports.

The process of the tests forks this process after collection, and runs the tests itself.
"""

import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import warnings
import weakref
from types import SimpleNamespace

from varcomm.transport import launch

_WORDS = 5  # of the command of a rank: folder, parent, rank, number of ranks and backend
_LONGEST = 1 << 20  # bytes of a message: the environment is the longest


class Forks:
    """A process that forks ranks; ``popen`` starts one, as ``subprocess.Popen`` does."""

    def __init__(self):
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._lock = threading.Lock()
        with warnings.catch_warnings():  # of threads, such as those of OpenBLAS, which are idle
            warnings.simplefilter("ignore", DeprecationWarning)
            is_here = os.fork()
        if not is_here:
            self._socket.close()
            _serve(other)
        other.close()
        weakref.finalize(self, self._socket.close)  # at exit, after those of ranks

    def ask(self, *question):
        """Return the answer of the process, which gets this process's output with the question."""
        with self._lock:
            socket.send_fds(self._socket, [pickle.dumps(question)], [1, 2])
            return pickle.loads(self._socket.recv(_LONGEST))

    def popen(self, command, env, **options):
        """Start a rank; a command of another program, as mpiexec, in a new process."""
        if command[0] != sys.executable:
            return subprocess.Popen(command, env=env, **options)
        return _Rank(self, command[-_WORDS:], env)

    def serve_ranks(self):
        """Let ``varcomm.Ranks`` start its ranks here."""
        launch.subprocess = SimpleNamespace(**vars(subprocess) | {"Popen": self.popen})


class _Rank:
    """What ``varcomm.Ranks`` uses of ``subprocess.Popen``."""

    def __init__(self, forks, words, env):
        self.pid, self.returncode = forks.ask("start", words, env, os.getcwd()), None
        self._forks = forks

    def poll(self):
        if self.returncode is None:
            self.returncode = self._forks.ask("poll", self.pid)
        return self.returncode

    def wait(self, timeout=float("inf")):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout)
            time.sleep(0.002)
        return self.returncode


def _serve(asked):
    """Answer until the process of the tests ends."""
    gc.collect()
    gc.freeze()  # a collection would copy what forks share
    while True:
        data, output, *_ = socket.recv_fds(asked, _LONGEST, 2)
        if not data:
            os._exit(0)
        what, value, *more = pickle.loads(data)
        if what == "start":
            value = _fork(asked, output, value, *more)
            while os.getpgid(value) != value:
                time.sleep(0.0005)
        for fd in output:
            os.close(fd)
        if what == "poll":
            pid, status = os.waitpid(value, os.WNOHANG)
            value = os.waitstatus_to_exitcode(status) if pid else None
        asked.send(pickle.dumps(value))


def _fork(asked, output, words, env, working_directory):
    """Return the id of a new process, which becomes a rank."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        asked.close()
        os.setsid()
        os.chdir(working_directory)
        for fd, given in enumerate((os.open(os.devnull, os.O_RDONLY), *output)):
            os.dup2(given, fd)
            os.close(given)
        sys.stdout, sys.stderr = (os.fdopen(fd, "w", 1, closefd=False) for fd in (1, 2))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)  # Python's own filters; those here are of tests
        os.environ.clear()
        os.environ.update(env)
        launch.subprocess = subprocess
        folder, _, *place = words
        launch.serve(folder, str(os.getppid()), *place)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
