"""Two hosts on one machine: namespaces of the network, joined by a cable of which one has hold."""

import contextlib
import os
import shutil
import signal
import subprocess


class NotPermitted(RuntimeError):
    """Namespaces cannot be made here."""


class Hosts:
    """Two namespaces, ``10.77.0.1`` and ``10.77.0.2``, whose interface is called ``cable``."""

    def __init__(self):
        self._names = [f"varcomm-{os.getpid()}-{host}" for host in (0, 1)]
        self._processes = []

    def __enter__(self):
        if shutil.which("ip") is None or shutil.which("tc") is None:
            raise NotPermitted("needs ip and tc, of iproute2")
        first, second = self._names
        try:
            for name in self._names:
                _ip("netns", "add", name)
            ends = "name", "cable", "netns", second
            _ip("-n", first, "link", "add", "cable", "type", "veth", "peer", *ends)
            for host, name in enumerate(self._names):
                _ip("-n", name, "addr", "add", f"{self.address(host)}/24", "dev", "cable")
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("-n", name, "link", "set", "cable", "up")
        except subprocess.CalledProcessError as error:
            self.__exit__()
            raise NotPermitted(f"needs namespaces of the network: {error.stderr}") from error
        return self

    def __exit__(self, *_):
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def address(self, host):
        return f"10.77.0.{host + 1}"

    def start(self, host, command, log, **environment):
        """Start a program on a host, which writes into a file what it says."""
        own = {"GLOO_SOCKET_IFNAME": "cable", "OMP_NUM_THREADS": "1", **environment}
        with log.open("w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._names[host], *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def cut(self):
        """Pull the plug: what is sent is lost, and nobody is told."""
        _ip("-n", self._names[0], "link", "set", "cable", "down")

    def slow(self):
        """Let 1 kbit pass in a second, in which a message takes minutes."""
        where = ["-n", self._names[0], "qdisc", "add", "dev", "cable", "root"]
        how = ["tbf", "rate", "1kbit", "burst", "1600", "limit", "10000000"]
        subprocess.run(["tc", *where, *how], check=True, capture_output=True, text=True)

    def mend(self):
        """Make the cable what it was."""
        where = ["-n", self._names[0], "qdisc", "del", "dev", "cable", "root"]
        subprocess.run(["tc", *where], check=False, capture_output=True)
        _ip("-n", self._names[0], "link", "set", "cable", "up")


def _ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
