"""Variables of each launcher: the place they describe, and refusals."""

import pytest

from varcomm.errors import LaunchError
from varcomm.transport.environment import Place, first_host, read

MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", **MASTER}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SBATCH = {  # of a batch script: rank 0 of a job, although no ranks were started
    "SLURM_JOB_ID": "4711",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_JOB_NODELIST": "node[01-04,07]",
}
SRUN = SBATCH | {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "node[02-04]",
}
PORT = {"MASTER_PORT": "1234"}
HOME = "tcp://127.0.0.1:29500"
ON_TWO_HOSTS = [OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, MPICH | {"MPI_LOCALNRANKS": "1"}]


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


PLACES = [
    ({"HOME": "/", "WORLD_SIZE": "1"}, Place()),
    ({"RANK": "", "WORLD_SIZE": " "}, Place()),
    (SBATCH, Place()),
    (without(SBATCH, "SLURM_PROCID"), Place()),
    (SBATCH | {"SLURM_STEP_ID": str(0xFFFFFFFA)}, Place()),  # an interactive shell
    (TORCHRUN, Place(5, 8, 1, "env://", "torchrun")),
    (TORCHRUN | {"SLURM_STEP_ID": "4294967290"}, Place(5, 8, 1, "env://", "torchrun")),
    (SRUN | TORCHRUN, Place(5, 8, 1, "env://", "torchrun")),
    (TORCHRUN | AGENT, Place(5, 8, 1, "env://", "torchrun", lasting_store=True)),
    ({"RANK": "0", "WORLD_SIZE": "1"} | AGENT, Place(0, 1, 0, None, "torchrun")),
    (OPEN_MPI, Place(1, 4, 1, HOME, "Open MPI")),
    (MPICH, Place(2, 3, 2, HOME, "MPICH")),
    (MPICH | {"RANK": "", "MASTER_ADDR": ""}, Place(2, 3, 2, HOME, "MPICH")),
    # steps of SLURM start the daemons of mpirun
    (SRUN | OPEN_MPI | PORT, Place(1, 4, 1, "tcp://127.0.0.1:1234", "Open MPI")),
    (SRUN | MPICH | PORT, Place(2, 3, 2, "tcp://127.0.0.1:1234", "MPICH")),
    (SRUN | PORT, Place(5, 6, 1, "tcp://node02:1234", "SLURM")),
    (SRUN | PORT | {"PMI_RANK": "5"}, Place(5, 6, 1, "tcp://node02:1234", "SLURM")),
    (SRUN | MASTER, Place(5, 6, 1, "tcp://head:1234", "SLURM")),
    (SRUN | PORT | {"MASTER_ADDR": "::1"}, Place(5, 6, 1, "tcp://[::1]:1234", "SLURM")),
    (ON_TWO_HOSTS[0] | MASTER, Place(1, 4, 1, "tcp://head:1234", "Open MPI")),
]


def test_places():
    for environ, place in PLACES:
        assert read(environ) == place, environ
    no_nodes = without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    for environ in (*ON_TWO_HOSTS, no_nodes, without(TORCHRUN, "MASTER_ADDR")):
        place = read(environ, mpi=True)  # MPI needs no address
        assert (place.meeting_point, place.size > 1) == (None, True), environ


def test_ranks_on_this_host():
    for environ, size in (
        (TORCHRUN, 0),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "4"}, 4),
        (OPEN_MPI, 4),
        (MPICH, 3),
        (SRUN, 0),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, 2),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, 0),
    ):
        assert read(environ).local_size == size, environ


def test_the_port_belongs_to_the_job():
    def port(**changes):
        return int(read(SRUN | changes).meeting_point.rsplit(":", 1)[1])

    assert port() == port(SLURM_PROCID="0")
    assert len({port(), port(SLURM_JOB_ID="4712"), port(SLURM_STEP_ID="1")}) == 3
    assert all(10_000 <= port(SLURM_JOB_ID=str(job)) < 30_000 for job in range(100))
    assert read(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-1"}).meeting_point != HOME


def test_first_host():
    for nodes, host in (
        ("node[01-04,07]", "node01"),
        ("node[7,01-04]", "node7"),
        ("gpu3,node[01-04]", "gpu3"),
        ("login", "login"),
        ("rack[2-3]n[7,9]-ib,x", "rack2n7-ib"),
    ):
        assert first_host(nodes) == host
    assert {first_host(nodes) for nodes in ("", "node[", "node[]", ",a")} == {None}


REFUSALS = [
    (TORCHRUN | {"RANK": "8"}, "RANK=8 and WORLD_SIZE=8"),
    (TORCHRUN | {"RANK": "one"}, "RANK='one'"),
    (TORCHRUN | {"LOCAL_RANK": "-1"}, "LOCAL_RANK='-1'"),
    (without(TORCHRUN, "WORLD_SIZE"), "WORLD_SIZE"),
    (without(TORCHRUN, "RANK"), "Export RANK"),
    (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_SIZE"),
    (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), "OMPI_COMM_WORLD_LOCAL_RANK"),
    (MPICH | {"PMI_SIZE": "x"}, "PMI_SIZE='x'"),
    (without(MPICH, "MPI_LOCALRANKID"), "MPI_LOCALRANKID"),
    ({"MV2_COMM_WORLD_RANK": "0"}, "MV2_COMM_WORLD_RANK is set"),
    *((environ, "Export MASTER_ADDR") for environ in ON_TWO_HOSTS),
    (SRUN | {"SLURM_PROCID": "6"}, "SLURM_PROCID=6 and SLURM_STEP_NUM_TASKS=6"),
    (SRUN | MASTER | {"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
    (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "Export MASTER_ADDR"),
]


def test_refusals_name_the_variable():
    for environ, named in REFUSALS:
        with pytest.raises(LaunchError, match=named):
            read(environ)
