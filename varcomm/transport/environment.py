"""Variables of launchers: the rank, the number of ranks and the address at which they meet.

torchrun, ``mpirun`` (Open MPI, MPICH, MVAPICH2) and ``srun`` start a process per rank and describe
it in variables of their own. :func:`read` is a pure function that returns one :class:`Place`.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from varcomm.errors import LaunchError

__all__ = ["Place", "first_host", "read"]

# SLURM numbers real steps from 0; the batch script and interactive shells are steps from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class Place:
    """Place of a process among the ranks of its job, and the address at which they meet.

    `local_rank` counts the ranks on this host. `meeting_point` is an ``init_method`` of
    :func:`torch.distributed.init_process_group`; None for a single rank, and under MPI. A
    `lasting_store` outlives the ranks, so it may hold the addresses of an earlier start.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    meeting_point: str | None = None
    launcher: str = "no launcher"
    lasting_store: bool = False


def read(environ: Mapping[str, str], mpi: bool = False) -> Place:
    """Return this process's place by the variables of its launcher; one rank without a launcher.

    Launchers in this order: torchrun, Open MPI, MVAPICH2, MPICH, SLURM. SLURM is last because
    ``mpirun`` inside an allocation starts its daemons by ``srun``, whose variables the ranks
    inherit. ``MASTER_ADDR`` and ``MASTER_PORT`` win over derived ones. Empty variables count as
    unset. Ranks that `mpi` joins need no meeting point.

    Raises
    ------
    LaunchError
        If variables are missing, are not integers, or contradict each other.

    Examples
    --------
    >>> read({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1",
    ...       "MASTER_ADDR": "node01", "MASTER_PORT": "29500"}) == Place(
    ...     rank=1, size=2, local_rank=1, meeting_point="env://", launcher="torchrun")
    True
    """
    environ = {name: value for name, value in environ.items() if value.strip()}
    if "RANK" in environ:
        return _torchrun(environ, mpi)
    if "OMPI_COMM_WORLD_RANK" in environ:
        return _mpirun(environ, mpi, "Open MPI", "OMPI_COMM_WORLD_{}", "PMIX_NAMESPACE")
    if "MV2_COMM_WORLD_RANK" in environ:
        return _mpirun(environ, mpi, "MVAPICH2", "MV2_COMM_WORLD_{}", "PMI_PORT")
    if "MPI_LOCALRANKID" in environ:
        return _mpirun(environ, mpi, "MPICH", "PMI_{}", "PMI_PORT")
    in_step = 0 <= _integer(environ, "SLURM_STEP_ID", -1) < _FIRST_SPECIAL_STEP
    if "SLURM_PROCID" in environ and in_step:
        return _slurm(environ, mpi)
    if "PMI_RANK" in environ:
        raise LaunchError(
            f"PMI_RANK={environ['PMI_RANK']!r} is set, but MPI_LOCALRANKID is not: "
            "the rank on this host is unknown. "
            "Export RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for every rank."
        )
    if _integer(environ, "WORLD_SIZE", 1) != 1:
        raise LaunchError(
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} is set, but RANK is not. "
            "Export both, or neither to run as one rank."
        )
    return Place()


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list.

    >>> first_host("node[01-04,07],login1"), first_host("rack[2-3]n[7,9]-ib"), first_host("a,b")
    ('node01', 'rack2n7-ib', 'a')
    """
    hosts = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodes.strip())
    if hosts is None:
        raise LaunchError(
            f"cannot read a host from the SLURM node list {nodes!r}. Export MASTER_ADDR."
        )
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", hosts[0])


def _torchrun(environ: Mapping[str, str], mpi: bool) -> Place:
    rank, size = _rank_and_size(environ, "RANK", "WORLD_SIZE")
    local_rank = _integer(environ, "LOCAL_RANK", 0)
    if mpi or size == 1:
        return Place(rank, size, local_rank, None, "torchrun")
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in environ]
    if missing:
        raise LaunchError(
            f"RANK={rank} and WORLD_SIZE={size} are set, but {' and '.join(missing)} not. "
            "Start with torchrun, or export them for every rank."
        )
    # "env://", since torchrun's agent may already serve the store at that port
    lasting = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(rank, size, local_rank, "env://", "torchrun", lasting)


def _mpirun(environ: Mapping[str, str], mpi: bool, launcher: str, name: str, job: str) -> Place:
    rank, size = _rank_and_size(environ, name.format("RANK"), name.format("SIZE"))
    if launcher == "MPICH":
        local_rank_name, local_size_name = "MPI_LOCALRANKID", "MPI_LOCALNRANKS"
    else:
        local_rank_name, local_size_name = name.format("LOCAL_RANK"), name.format("LOCAL_SIZE")
    local_rank = _integer(environ, local_rank_name)
    if mpi:
        return Place(rank, size, local_rank, None, launcher)
    if size > 1 and "MASTER_ADDR" not in environ and _integer(environ, local_size_name, 0) != size:
        raise LaunchError(
            f"{launcher} started {size} ranks on several hosts, but does not say where rank 0 is. "
            "Export MASTER_ADDR=<its host> and MASTER_PORT=<a free port there> for every rank."
        )
    address = _address(environ, "127.0.0.1", environ.get(job, ""))
    return Place(rank, size, local_rank, address, launcher)


def _slurm(environ: Mapping[str, str], mpi: bool) -> Place:
    # a step may have fewer tasks and hosts than its job
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    rank, size = _rank_and_size(environ, "SLURM_PROCID", size_name)
    local_rank = _integer(environ, "SLURM_LOCALID")
    if mpi:
        return Place(rank, size, local_rank, None, "SLURM")
    if "MASTER_ADDR" in environ or size == 1:
        host = "127.0.0.1"
    else:
        names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        nodes = next((environ[name] for name in names if name in environ), None)
        if nodes is None:
            raise LaunchError(
                f"SLURM_PROCID={rank} is set, but {', '.join(names)} are not. "
                "Export MASTER_ADDR=<host of rank 0> for every rank."
            )
        host = first_host(nodes)
    job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return Place(rank, size, local_rank, _address(environ, host, job), "SLURM")


def _address(environ: Mapping[str, str], host: str, job: str) -> str:
    """Return the address, with a port derived from the job: two jobs on one host do not meet.

    The port is below those that the system assigns; torch's default if the job has no name.
    """
    derived = 10_000 + zlib.crc32(job.encode()) % 20_000 if job else 29_500
    port = _integer(environ, "MASTER_PORT", derived)
    host = environ.get("MASTER_ADDR", host)
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _rank_and_size(environ: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int]:
    rank, size = _integer(environ, rank_name), _integer(environ, size_name)
    if not 0 <= rank < size:
        raise LaunchError(
            f"{rank_name}={rank} and {size_name}={size} contradict each other: "
            "need 0 <= rank < size."
        )
    return rank, size


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
