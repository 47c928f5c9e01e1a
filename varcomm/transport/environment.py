"""Variables of launchers: the rank, the number of ranks and the address at which they meet."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from varcomm.errors import LaunchError


@dataclass(frozen=True)
class Place:
    """Place of a process among the ranks of its job, and the address at which they meet.

    `meeting_point` is an ``init_method`` for torch; None for a single rank, and under MPI. A
    `lasting_store` may hold the addresses of an earlier start.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    meeting_point: str | None = None
    launcher: str = "no launcher"
    lasting_store: bool = False
    local_size: int = field(default=0, compare=False)  # ranks on this host; 0 if unknown


class _Launcher(NamedTuple):
    """Names of the variables of a launcher; of several separated by spaces."""

    name: str
    rank: str
    sizes: str  # the first that is set holds the number of ranks
    local_rank: str
    local_size: str = ""  # ranks on this host
    job: str = ""  # together they identify the job


# SLURM is last because `mpirun` inside an allocation starts its daemons by `srun`, whose variables
# the ranks inherit. A step of SLURM may have fewer tasks and hosts than its job.
_TASKS, _STEP = "SLURM_STEP_NUM_TASKS SLURM_NTASKS", "SLURM_JOB_ID SLURM_STEP_ID"
_OMPI = "OMPI_COMM_WORLD"
_LAUNCHERS = (
    _Launcher("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Launcher(
        "Open MPI",
        f"{_OMPI}_RANK",
        f"{_OMPI}_SIZE",
        f"{_OMPI}_LOCAL_RANK",
        f"{_OMPI}_LOCAL_SIZE",
        "PMIX_NAMESPACE",
    ),
    _Launcher("MPICH", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMI_PORT"),
    _Launcher("SLURM", "SLURM_PROCID", _TASKS, "SLURM_LOCALID", "", _STEP),
)
_NODES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")

# SLURM numbers real steps from 0; the batch script and interactive shells are steps from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def read(environ: Mapping[str, str], mpi: bool = False) -> Place:
    """Return this process's place by the variables of its launcher; one rank without a launcher.

    ``MASTER_ADDR`` and ``MASTER_PORT`` win over derived ones. Empty variables count as unset. Ranks
    that `mpi` joins need no meeting point. LaunchError if variables are missing or wrong.
    """
    environ = {name: value for name, value in environ.items() if value.strip()}
    launcher = next((one for one in _LAUNCHERS if _has_started(one, environ)), None)
    if launcher is None:
        unknown = environ.keys() & {"PMI_RANK", "MV2_COMM_WORLD_RANK"}  # MVAPICH2 is not supported
        if unknown or _integer(environ, "WORLD_SIZE", 1) != 1:
            raise LaunchError(
                f"{min(unknown, default='WORLD_SIZE')} is set, but MPI_LOCALRANKID or RANK is not. "
                "Export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every rank."
            )
        return Place()
    *first, last = launcher.sizes.split()
    size_name = next((name for name in first if name in environ), last)
    rank, size = _integer(environ, launcher.rank), _integer(environ, size_name)
    if rank >= size:
        raise LaunchError(
            f"{launcher.rank}={rank} and {size_name}={size} contradict each other: "
            "need 0 <= rank < size."
        )
    local_rank = _integer(environ, launcher.local_rank, 0 if launcher.name == "torchrun" else None)
    point = None if mpi else _meeting_point(launcher, environ, size)
    lasting = point == "env://" and environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    on_host = _integer(environ, launcher.local_size, 0)
    if launcher.name == "SLURM":  # 8(x2): 8 on each of 2 hosts
        tasks = re.fullmatch(r"(\d+)(\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "0"))
        on_host = int(tasks[1]) if tasks else 0
    return Place(rank, size, local_rank, point, launcher.name, lasting, on_host)


def _has_started(launcher: _Launcher, environ: Mapping[str, str]) -> bool:
    # SLURM sets PMI_RANK too
    sign = launcher.local_rank if launcher.name == "MPICH" else launcher.rank
    if sign not in environ or launcher.name != "SLURM":
        return sign in environ
    return _integer(environ, "SLURM_STEP_ID", _FIRST_SPECIAL_STEP) < _FIRST_SPECIAL_STEP


def _meeting_point(launcher: _Launcher, environ: Mapping[str, str], size: int) -> str | None:
    """Return the address, with a port derived from the job: two jobs on one host do not meet."""
    if launcher.name == "torchrun":  # its agent may already serve the store
        return "env://" if size > 1 else None
    host = environ.get("MASTER_ADDR")
    if host is None and (size == 1 or _integer(environ, launcher.local_size, 0) == size):
        host = "127.0.0.1"
    elif host is None and launcher.name == "SLURM":
        host = first_host(next((environ[name] for name in _NODES if name in environ), ""))
    if host is None:
        raise LaunchError(
            f"{launcher.name} started {size} ranks, but does not say where rank 0 is. Export "
            "MASTER_ADDR=<its host> and MASTER_PORT=<a free port there> for every rank."
        )
    job = ".".join(environ.get(name, "") for name in launcher.job.split())
    derived = 10_000 + zlib.crc32(job.encode()) % 20_000 if job else 29_500
    port = _integer(environ, "MASTER_PORT", derived)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def first_host(nodes: str) -> str | None:
    """Return the first host of a SLURM node list: ``node01`` of ``node[01-04,07],login1``."""
    hosts = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodes.strip())
    return hosts and re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts[0])


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a non-negative integer, or the default if it is not set."""
    text = environ.get(name)
    if text is None and default is not None:
        return default
    if text is None:
        raise LaunchError(f"the launcher's variables are incomplete: {name} is not set.")
    if not text.strip().isdecimal():
        raise LaunchError(f"{name}={text!r} is not a non-negative integer.")
    return int(text)
