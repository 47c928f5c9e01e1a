"""
Run on SLURM, on MPI and on several hosts
=========================================

Your script runs on your own machine, and now you want the same script to run on a cluster. This
tutorial starts one script with torchrun, with SLURM's ``srun`` and with MPI's ``mpiexec``, on one
host and on several hosts. It takes 15 minutes. You need to know how to submit a job on your
cluster. The :ref:`batch scripts <batch-scripts>` come first.
"""

# %%
# .. _batch-scripts:
#
# Batch scripts
# -------------
#
# These scripts have not been run on a cluster. The scripts start ``train.py``, which calls
# ``vc.init()`` first. Fill in your partition, your account and the number of GPUs per host. The
# folders of the script and of its checkpoints must be on a file system that all hosts share.
#
# **SLURM, one task per GPU.** This script is the shortest. SLURM starts the ranks, and no address
# is needed.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --partition=gpu
#     #SBATCH --account=my_project
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
# **SLURM, one torchrun per host.** If a rank fails, torchrun restarts all ranks. Your script must
# therefore load the last checkpoint when it starts.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --partition=gpu
#     #SBATCH --account=my_project
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
#         --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d \
#         --rdzv-endpoint="$first:29500" train.py
#
# **MPI on hosts without GPUs.** Here ``train.py`` calls ``vc.init("mpi")``. MPICH's ``mpiexec``
# finds the hosts of a SLURM job. Use the ``mpiexec`` of Open MPI in the same way. Without
# ``mpiexec``, ``srun --mpi=pmix`` starts ranks for Open MPI.
#
# .. code-block:: bash
#
#     #!/bin/bash
#     #SBATCH --job-name=train
#     #SBATCH --partition=gpu
#     #SBATCH --account=my_project
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
# **Without a batch system.** Run this command on each of two hosts, with the name of the first
# host:
#
# .. code-block:: bash
#
#     torchrun --nnodes=2 --nproc-per-node=8 \
#         --rdzv-id=train --rdzv-backend=c10d --rdzv-endpoint=first-host:29500 \
#         train.py
#
# The script
# ----------
#
# In the other tutorials, :func:`varcomm.launch` starts the ranks from Python. On a cluster, a
# launcher starts the same script once per rank. ``vc.init()`` joins the other ranks; call it first.
# The script is the same for all launchers. Here the script has the engine as an argument, only
# because this page uses two engines.

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SCRIPT = """
import sys
import torch, varcomm as vc

world = vc.init(sys.argv[1] if len(sys.argv) > 1 else None)
sizes = vc.ShardSizes.balanced(1003, world.size)
rows = sizes.range(world.rank)
own = torch.arange(rows.start, rows.stop, device=world.device)
total = vc.all_reduce(own.sum()).item()
place = f"rank {world.rank} of {world.size}, local rank {world.local_rank}"
result = f"rows {rows.start} to {rows.stop - 1}, total {total}"
line = f"{place}, on {world.device}: {result}\\n"
print(line, end="", flush=True)  # one write per line: ranks share a pipe
"""
folder = tempfile.TemporaryDirectory()
train = Path(folder.name, "train.py")
train.write_text(SCRIPT)


def start(*command, **environ):
    """Start a command whose ranks use the CPU."""
    environ = (
        os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | environ
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*map(str, command)], env=environ, **pipes)


def lines(*processes):
    """Return the printed lines, sorted, because ranks print in any order."""
    outputs = [process.communicate(timeout=300) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(errors)
    return sorted("".join(printed for printed, _ in outputs).splitlines())


# %%
# torchrun on one host
# --------------------
#
# Run ``torchrun --standalone --nproc-per-node 2 train.py``. ``--nproc-per-node gpu`` starts one
# rank per GPU. ``python -m torch.distributed.run`` is the same program as ``torchrun``.

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
print(
    "\n".join(lines(start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, train)))
)

# %%
# torchrun on several hosts
# -------------------------
#
# Run torchrun once on each host, with the address of one of the hosts. Here, two torchrun processes
# on one machine stand for two hosts. Each process starts two ranks. Ranks are numbered over all
# hosts, and local ranks are numbered per host. A rank uses the GPU of its local rank.

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
import re

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch

from varcomm import _figures as figures

COLOURS = figures.RANKS
INK, PALE = figures.INK, figures.PALE
plt.rcParams |= figures.style()
figure, ax = plt.subplots(figsize=(7.2, 2.4), layout="constrained")
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
    box = FancyBboxPatch((x + 0.02, 0), 0.88, 1, "round,pad=0,rounding_size=0.05")
    box.set(facecolor=COLOURS[int(rank)], lw=0)
    ax.add_patch(box)
    middle = {"ha": "center", "va": "center", "color": "black"}
    ax.text(x + 0.46, 0.74, f"rank {rank} of {size}", **middle, weight="bold")
    ax.text(x + 0.46, 0.46, f"local rank {local}", **middle)
    ax.text(x + 0.46, 0.2, f"rows {first}-{last}", **middle)
ax.set(xlim=(-0.15, 4.4), ylim=(-0.15, 1.45))
ax.axis("off")
plt.show()
# sphinx_gallery_end_ignore

# %%
# MPI
# ---
#
# ``vc.init("mpi")`` runs varcomm's collectives and plans over MPI, with mpi4py and an unmodified
# PyTorch. torch.distributed's own calls use Gloo. ``pip install mpi4py mpich`` installs mpi4py and
# MPICH; mpi4py can also load the MPI of your cluster. Use MPI on clusters of CPUs with a fast
# network that MPI supports. Ranks need no address. Start ranks with ``mpiexec`` or ``srun``, not
# with torchrun. On CPUs, ``vc.init()`` chooses MPI under ``mpiexec`` and ``mpirun``.

places = [
    str(Path(sys.executable).parent),
    os.environ["PATH"],
]  # this environment first
mpiexec = shutil.which("mpiexec", path=os.pathsep.join(places))
if mpiexec and find_spec("mpi4py"):
    print("\n".join(lines(start(mpiexec, "-n", 2, sys.executable, train, "mpi"))))
else:
    print("There is no MPI on this machine.")

# %%
# ``mpiexec`` can also start ranks that use Gloo or NCCL: call ``vc.init("gloo")``. On several
# hosts, these ranks need ``MASTER_ADDR`` and ``MASTER_PORT``.
#
# SLURM
# -----
#
# This page was built without SLURM. Instead, the page sets the variables that ``srun`` sets for
# each task, here for two tasks on one host:

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
# Environment variables
# ---------------------
#
# ``vc.init()`` uses the first of these launchers whose variables are set:
#
# - *torchrun*: ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``. Ranks meet at ``MASTER_ADDR`` and
#   ``MASTER_PORT``.
# - *Open MPI*: ``OMPI_COMM_WORLD_RANK``, ``OMPI_COMM_WORLD_SIZE`` and
#   ``OMPI_COMM_WORLD_LOCAL_RANK``. Ranks meet on this host; on several hosts, set ``MASTER_ADDR``.
# - *MPICH*: ``PMI_RANK``, ``PMI_SIZE`` and ``MPI_LOCALRANKID``. Ranks meet as with Open MPI.
# - *SLURM*: ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` and ``SLURM_LOCALID``. Ranks meet on the
#   first host of ``SLURM_STEP_NODELIST``.
# - *no launcher*: a world of one rank.
#
# If ``MASTER_ADDR`` and ``MASTER_PORT`` are set, they take precedence. Otherwise the port is
# derived from the job id, so that two jobs on one host use different ports. With
# ``vc.init("mpi")``, ranks need neither variable. Incomplete or contradictory variables raise a
# ``LaunchError``.
#
# Summary
# -------
#
# - The script starts with ``world = vc.init()``, and uses ``world.rank``, ``world.size`` and
#   ``world.device``.
# - On SLURM, ``srun`` is enough. Use torchrun to restart ranks after a failure, and
#   ``vc.init("mpi")`` on clusters of CPUs.
# - Before a long job, run the script for a minute on the full number of ranks, with
#   ``vc.init(timeout=60)``. If the network is configured wrongly, the script then fails after a
#   minute.
#
# Next: :doc:`find the rank that hangs </generated/tutorials/10_finding_a_hang>`. For jobs that end
# before the training does, see :doc:`/checkpoints`.
