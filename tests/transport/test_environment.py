"""What each launcher's variables mean, without connecting to anyone."""

import pytest

from varcomm.errors import LaunchError
from varcomm.transport.environment import Place, first_host, read

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-node01-4711@1",
}
MVAPICH2 = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SBATCH = {  # what a batch script sees: rank 0 of a job, though nobody has started ranks
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
MASTER = {"MASTER_ADDR": "head", "MASTER_PORT": "1234"}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def test_no_launcher_is_one_rank():
    assert read({"HOME": "/", "WORLD_SIZE": "1"}) == Place(0, 1, 0, None, "no launcher")


def test_empty_variables_are_not_set():
    assert read({"RANK": "", "WORLD_SIZE": " "}) == Place()
    assert read(MPICH | {"RANK": "", "MASTER_ADDR": ""}).launcher == "MPICH"
    with pytest.raises(LaunchError, match=r"RANK=5 and WORLD_SIZE=8 are set, but MASTER_ADDR not"):
        read(TORCHRUN | {"MASTER_ADDR": ""})


def test_torchrun():
    agents = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert read(TORCHRUN) == Place(5, 8, 1, "env://", "torchrun")
    assert read(SRUN | TORCHRUN).launcher == "torchrun", "in a job of SLURM"
    assert read(TORCHRUN | agents) == Place(5, 8, 1, "env://", "torchrun", lasting_store=True)
    assert not read(TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).lasting_store
    assert read({"RANK": "0", "WORLD_SIZE": "1"} | agents) == Place(0, 1, 0, None, "torchrun")


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, MVAPICH2])
def test_mpirun_on_one_host_meets_at_home(environ):
    place = read(environ)
    assert place.meeting_point.startswith("tcp://127.0.0.1:")
    assert (place.rank, place.local_rank) in {(1, 1), (2, 2)}


@pytest.mark.parametrize(
    ("environ", "local_size"),
    [
        (OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        (MPICH, "MPI_LOCALNRANKS"),
        (MVAPICH2 | {"MV2_COMM_WORLD_SIZE": "4"}, "MV2_COMM_WORLD_LOCAL_SIZE"),
    ],
)
def test_mpirun_on_several_hosts_needs_an_address(environ, local_size):
    environ = environ | {local_size: "2"}
    with pytest.raises(LaunchError, match=r"several hosts.*Export MASTER_ADDR=<its host>"):
        read(environ)
    assert read(environ | MASTER).meeting_point == "tcp://head:1234"


def test_mpirun_wins_over_slurm_whose_steps_start_its_daemons():
    assert read(SRUN | OPEN_MPI).launcher == "Open MPI"
    assert read(SRUN | MPICH).launcher == "MPICH"
    assert read(SRUN | MVAPICH2).launcher == "MVAPICH2"
    assert read(MVAPICH2 | {"PMI_RANK": "1", "PMI_SIZE": "2"}).launcher == "MVAPICH2"


def test_srun_meets_at_the_first_host_of_the_step():
    place = read(SRUN)
    assert (place.rank, place.size, place.local_rank, place.launcher) == (5, 6, 1, "SLURM")
    assert place.meeting_point.startswith("tcp://node02:")


def test_srun_that_sets_pmi_variables_too_is_srun():
    assert read(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "6"}).launcher == "SLURM"


def test_address_of_the_user_wins():
    assert read(SRUN | MASTER).meeting_point == "tcp://head:1234"
    assert read(SRUN | {"MASTER_PORT": "1234"}).meeting_point == "tcp://node02:1234"
    assert read(SRUN | MASTER | {"MASTER_ADDR": "::1"}).meeting_point == "tcp://[::1]:1234"


def test_port_is_the_jobs_own():
    def port(**changes):
        return int(read(SRUN | changes).meeting_point.rsplit(":", 1)[1])

    assert port() == port(SLURM_PROCID="0")
    assert len({port(), port(SLURM_JOB_ID="4712"), port(SLURM_STEP_ID="1")}) == 3
    assert read(MPICH).meeting_point == "tcp://127.0.0.1:29500"  # does not name the job
    assert all(10_000 <= port(SLURM_JOB_ID=str(job)) < 30_000 for job in range(100))


def test_batch_script_without_srun_is_one_rank():
    assert read(SBATCH) == Place()
    assert read(without(SBATCH, "SLURM_PROCID")) == Place()
    interactive = SBATCH | {"SLURM_STEP_ID": str(0xFFFFFFFA)}
    assert read(interactive) == Place()


def test_first_host():
    for nodes, host in (
        ("node[01-04,07]", "node01"),
        ("node[7,01-04]", "node7"),
        ("gpu3,node[01-04]", "gpu3"),
        ("login", "login"),
        ("rack[2-3]n[7,9]-ib,x", "rack2n7-ib"),
    ):
        assert first_host(nodes) == host
    for nodes in ("", "node[", "node[]", ",a"):
        with pytest.raises(LaunchError, match=r"SLURM node list .*MASTER_"):
            first_host(nodes)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (TORCHRUN | {"RANK": "8"}, r"RANK=8 and WORLD_SIZE=8 contradict each other"),
        (TORCHRUN | {"RANK": "one"}, r"RANK='one' is not a non-negative integer"),
        (TORCHRUN | {"LOCAL_RANK": "-1"}, r"LOCAL_RANK='-1' is not a non-negative integer"),
        (without(TORCHRUN, "WORLD_SIZE"), r"incomplete: WORLD_SIZE is not set"),
        (without(TORCHRUN, "RANK"), r"WORLD_SIZE='8' is set, but RANK is not"),
        (without(TORCHRUN, "MASTER_ADDR"), r"are set, but MASTER_ADDR not.*torchrun"),
        (
            without(TORCHRUN, "MASTER_ADDR", "MASTER_PORT"),
            r"RANK=5 and WORLD_SIZE=8 are set, but MASTER_ADDR and MASTER_PORT not",
        ),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "4"}, r"OMPI_COMM_WORLD_RANK=4 and OMPI_COMM_WORLD_S"),
        (without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"), r"OMPI_COMM_WORLD_LOCAL_RANK is not set"),
        (MPICH | {"PMI_SIZE": "x"}, r"PMI_SIZE='x' is not"),
        (without(MPICH, "MPI_LOCALRANKID"), r"PMI_RANK='2' is set, but MPI_LOCALRANKID is not"),
        (without(MVAPICH2, "MV2_COMM_WORLD_LOCAL_RANK"), r"MV2_COMM_WORLD_LOCAL_RANK is not set"),
        (SRUN | {"SLURM_PROCID": "6"}, r"SLURM_PROCID=6 and SLURM_STEP_NUM_TASKS=6 contradict"),
        (SRUN | MASTER | {"MASTER_PORT": "http"}, r"MASTER_PORT='http' is not"),
        (
            without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
            r"SLURM_PROCID=5 is set, but SLURM_STEP_NODELIST, .* are not. Export MASTER_ADDR",
        ),
    ],
)
def test_contradictions_name_the_variable(environ, message):
    with pytest.raises(LaunchError, match=message):
        read(environ)


@pytest.mark.parametrize(
    "environ",
    [
        OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
        MPICH | {"MPI_LOCALNRANKS": "1"},
        MVAPICH2,
        without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"),
        without(TORCHRUN, "MASTER_ADDR"),
    ],
)
def test_ranks_of_mpi_need_no_address(environ):
    place = read(environ, mpi=True)
    assert place.meeting_point is None
    assert (place.rank, place.size) in {(1, 4), (2, 3), (1, 2), (5, 6), (5, 8)}
