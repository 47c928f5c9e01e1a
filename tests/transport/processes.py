"""Scripts as processes of their own, and whether processes live."""

import os
import subprocess
import sys
import time
from pathlib import Path


def is_running(pid):
    """Tell it of a process that need not be our child: a zombie with no other threads has ended."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_end(pids, within=10.0):
    deadline = time.monotonic() + within
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(is_running, pids))


def pids_of(ranks):
    return ranks.run(lambda rank: os.getpid())


def finished(*words, launcher=(), timeout=80, **environ):
    """Run Python, which finds varcomm and these tests; return its exit status and its output."""
    ours = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, sys.executable, *words],
        env=os.environ | ours | environ,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def torchrun(*words, ranks=2):
    """Run Python on ranks that torchrun starts."""
    run = "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"
    return finished(*run, *words, timeout=100)


def script(tmp_path, code, **options):
    """Start `code` as a script of its own that finds varcomm."""
    path = tmp_path / "script.py"
    path.write_text(code)
    return subprocess.Popen(
        [sys.executable, path],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
