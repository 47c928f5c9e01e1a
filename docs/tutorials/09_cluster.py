"""
From a laptop to a cluster
==========================

You will learn to start one and the same script with torchrun, with SLURM's ``srun`` and with MPI's
``mpiexec``, on one host and on several, and what ``vc.init()`` reads to find out where it is. You
need to know how to submit a job on your cluster. There are complete batch scripts at the end.
"""

# %%
# The script
# ----------
#
# So far, :func:`varcomm.launch` has started ranks from within Python. On a cluster something else
# starts them: the same script, once per rank. Its first line of varcomm is ``vc.init()``, which
# joins the other ranks. Nothing in it depends on who has started it; the name of the engine is an
# argument here only because this page tries two.

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

SCRIPT = """
import sys
import torch, varcomm as vc

world = vc.init(sys.argv[1] if len(sys.argv) > 1 else None)
sizes = vc.ShardSizes.balanced(1003, world.size)
rows = sizes.range(world.rank)
own = torch.arange(rows.start, rows.stop, device=world.device)
total = vc.all_reduce(own.sum()).item()
said = f"rank {world.rank} of {world.size}, local rank {world.local_rank}, on {world.device}: "
said += f"rows {rows.start} to {rows.stop - 1}, total {total}"
print(said + "\\n", end="", flush=True)                # ranks share a pipe: a line at once
"""
folder = tempfile.TemporaryDirectory()
train = Path(folder.name, "train.py")
train.write_text(SCRIPT)


def start(*command, **environ):
    """Start a command; on a GPU's host, ranks of this page stay on the CPU."""
    environ = (
        os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environ
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command)], env=environ, **pipes)


def lines(*processes):
    """What processes have printed, sorted, since ranks print in any order."""
    said = [process.communicate(timeout=300) for process in processes]
    for process, (_, complaint) in zip(processes, said, strict=True):
        if process.returncode:
            raise RuntimeError(complaint)
    return sorted("".join(printed for printed, _ in said).splitlines())


# %%
# torchrun on one host
# --------------------
#
# ``torchrun --standalone --nproc-per-node 2 train.py`` on a laptop; ``--nproc-per-node gpu`` takes
# as many ranks as there are GPUs. (``python -m torch.distributed.run`` is the same program.)

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
print(
    "\n".join(lines(start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, train)))
)

# %%
# torchrun on several hosts
# -------------------------
#
# Then torchrun runs once on each host, with the same address of one of them, at which they meet.
# Two of them on one machine do what they would do on two hosts. Each starts two ranks. Ranks count
# on from host to host, local ranks begin anew: a rank takes the GPU of its local rank.

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
meet = [
    "--rdzv-backend",
    "c10d",
    "--rdzv-endpoint",
    f"127.0.0.1:{port}",
    "--rdzv-id",
    "a-job",
]
hosts = [
    start(*TORCHRUN, "--nnodes", 2, "--nproc-per-node", 2, *meet, train)
    for _ in range(2)
]
found = lines(*hosts)
print("\n".join(found))

# sphinx_gallery_start_ignore
COLOURS = ["#a9d8f4", "#f2cf80"]  # one a host
INK, PALE = "#22272b", "#8a9299"
plt.rcParams |= {"font.size": 11, "figure.facecolor": "white", "text.color": INK}
figure, ax = plt.subplots(figsize=(9, 2.5), layout="constrained")
pattern = r"rank (\d+) of (\d+), local rank (\d+), on \w+: rows (\d+) to (\d+)"
for rank, size, local, first, last in (
    re.match(pattern, line).groups() for line in found
):
    host = int(rank) // 2
    x = int(rank) + 0.3 * host
    if local == "0":
        frame = FancyBboxPatch(
            (x - 0.05, -0.1), 2.02, 1.2, "round,pad=0.02,rounding_size=0.06"
        )
        frame.set(facecolor="none", edgecolor=PALE, lw=1.2)
        ax.add_patch(frame)
        ax.text(
            x + 0.96, 1.24, f"host {host}: torchrun", ha="center", weight="bold"
        )
    box = FancyBboxPatch((x + 0.05, 0), 0.82, 1, "round,pad=0,rounding_size=0.05")
    box.set(facecolor=COLOURS[host], lw=0)
    ax.add_patch(box)
    ax.text(
        x + 0.46,
        0.74,
        f"rank {rank} of {size}",
        ha="center",
        va="center",
        weight="bold",
    )
    ax.text(x + 0.46, 0.46, f"local rank {local}", ha="center", va="center")
    ax.text(x + 0.46, 0.2, f"rows {first} to {last}", ha="center", va="center")
ax.set(xlim=(-0.15, 4.4), ylim=(-0.15, 1.45))
ax.axis("off")
# sphinx_gallery_end_ignore
plt.show()

# %%
# MPI
# ---
#
# ``vc.init("mpi")`` runs varcomm's collectives and plans over MPI, with mpi4py and a stock PyTorch.
# torch.distributed's own calls use Gloo. ``pip install mpi4py mpich`` installs mpi4py and MPICH;
# mpi4py also loads the MPI of your cluster. It serves clusters of CPUs with a fast network that MPI
# supports. Ranks find each other without an address. Start them with ``mpiexec`` or ``srun``, not
# with torchrun. On CPUs, ``vc.init()`` chooses MPI by itself under ``mpiexec`` and ``mpirun``.

places = [
    str(Path(sys.executable).parent),
    os.environ["PATH"],
]  # that of this environment first
mpiexec = shutil.which("mpiexec", path=os.pathsep.join(places))
if mpiexec and find_spec("mpi4py"):
    print("\n".join(lines(start(mpiexec, "-n", 2, sys.executable, train, "mpi"))))
else:
    print("There is no MPI on this machine.")

# %%
# ``mpiexec`` may also start ranks that use Gloo or NCCL: ``vc.init("gloo")``. On several hosts,
# they need ``MASTER_ADDR`` and ``MASTER_PORT`` then.
#
# SLURM
# -----
#
# There is no SLURM where this page is made. What ``srun`` tells each task we can tell it as well:
# these are the variables that ``vc.init()`` reads, here for two tasks on one host.

tasks = [
    start(
        sys.executable,
        train,
        SLURM_PROCID=str(task),
        SLURM_LOCALID=str(task),
        SLURM_STEP_NUM_TASKS="2",
        SLURM_STEP_NODELIST="localhost",
        SLURM_JOB_ID=str(port),
        SLURM_STEP_ID="0",
    )
    for task in range(2)
]
print("\n".join(lines(*tasks)))
folder.cleanup()

# %%
# What ``vc.init()`` reads
# ------------------------
#
# The first of these that is there counts, in this order:
#
# ============ ================================================== ==================================
# started by   where this rank is                                 where ranks meet
# ============ ================================================== ==================================
# torchrun     ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``           ``MASTER_ADDR``, ``MASTER_PORT``
# Open MPI     ``OMPI_COMM_WORLD_RANK``, ``_SIZE``,               this host; on several hosts
#              ``_LOCAL_RANK``                                    ``MASTER_ADDR``
# MPICH        ``PMI_RANK``, ``PMI_SIZE``, ``MPI_LOCALRANKID``    the same
# SLURM        ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS``,        the first host of
#              ``SLURM_LOCALID``                                  ``SLURM_STEP_NODELIST``
# nothing      one rank                                           nowhere
# ============ ================================================== ==================================
#
# ``MASTER_ADDR`` and ``MASTER_PORT`` win where they are set. Else the port is derived from the
# number of the job, so that two jobs on one host do not meet. With ``vc.init("mpi")``, ranks need
# no place to meet. Incomplete or contradictory variables raise a ``LaunchError``.
#
# Batch scripts
# -------------
#
# They have not been run for this page, for want of a cluster; fill in what is yours: partition,
# account, the number of GPUs of a host. The folder of the script and that of its checkpoints must
# be on a file system that all hosts share.
#
# **SLURM, one task per GPU.** The shortest. SLURM starts the ranks, and there is no address to
# give.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --nodes=4
#     #SBATCH --ntasks-per-node=8
#     #SBATCH --gpus-per-node=8
#     #SBATCH --cpus-per-task=8
#     #SBATCH --time=04:00:00
#     #SBATCH --output=%x-%j.log
#
#     set -euo pipefail
#     source "$HOME/venv/bin/activate"
#     export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
#
#     srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python train.py
#
# **SLURM, one torchrun per host.** Where ranks shall be started again after one has failed: each
# time all of them begin anew, from the last checkpoint.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --nodes=4
#     #SBATCH --ntasks-per-node=1
#     #SBATCH --gpus-per-node=8
#     #SBATCH --cpus-per-task=64
#     #SBATCH --time=04:00:00
#     #SBATCH --output=%x-%j.log
#
#     set -euo pipefail
#     source "$HOME/venv/bin/activate"
#     export OMP_NUM_THREADS=8
#     first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
#
#     srun --cpus-per-task="$SLURM_CPUS_PER_TASK" torchrun \
#         --nnodes="$SLURM_NNODES" --nproc-per-node=8 --max-restarts=3 \
#         --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:29500" \
#         train.py
#
# **MPI on hosts without GPUs.** Here ``train.py`` calls ``vc.init("mpi")``. MPICH's ``mpiexec``
# finds the hosts of a SLURM job by itself. Open MPI's is called in the same way; without it, ``srun
# --mpi=pmix`` starts ranks for Open MPI.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --nodes=4
#     #SBATCH --ntasks-per-node=16
#     #SBATCH --cpus-per-task=4
#     #SBATCH --time=04:00:00
#     #SBATCH --output=%x-%j.log
#
#     set -euo pipefail
#     source "$HOME/venv/bin/activate"
#     export OMP_NUM_THREADS="$SLURM_CPUS_PER_TASK"
#
#     mpiexec -n "$SLURM_NTASKS" python train.py
#
# **Without a batch system.** On each of two hosts, with the name of the first one:
#
# .. code-block:: bash
#
#     torchrun --nnodes=2 --nproc-per-node=8 \
#         --rdzv-id=train --rdzv-backend=c10d --rdzv-endpoint=first-host:29500 \
#         train.py
#
# What to take away
# -----------------
#
# - One script: ``world = vc.init()`` first, then ``world.rank``, ``world.size`` and
#   ``world.device``.
# - ``srun`` alone is enough on SLURM; torchrun where ranks shall start again; ``vc.init("mpi")``
#   for clusters of CPUs.
# - Before the first long job, run the script for a minute with as many ranks as there will be, and
#   with ``vc.init(timeout=60)``, so that a wrong network is found out soon.
#
# Read next: :doc:`/checkpoints`, for jobs that end before the training does, then
# :doc:`finding a hang </generated/tutorials/10_finding_a_hang>`.
