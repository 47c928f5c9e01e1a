"""All commands: help, output that cannot be written, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from varcomm.cli.main import main

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "partition", "inspect", "simulate", "bench")
# A shell that starts a process in the background makes it ignore Ctrl-C; here it must not.
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from varcomm.cli.main import main; sys.exit(main())"
)


@pytest.mark.parametrize(
    ("path", "prog"),
    [("/usr/bin/varcomm", "varcomm"), ("/site/varcomm/__main__.py", "python -m varcomm")],
)
def test_help(path, prog, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [path])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    listed = [line.split()[0] for line in shown.splitlines() if line.startswith("    ")]
    assert listed == list(COMMANDS)
    assert "exit status: 0 success, 1 failure, 2 usage error, 130 Ctrl-C" in shown
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert shown.startswith(f"usage: {prog} {name} ")
        assert f"\nexample:\n  {prog} {name} " in shown
        assert max(map(len, shown.splitlines())) <= 80


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip()


def test_without_a_stdout(monkeypatch, tmp_path):
    np.savez(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]])
    monkeypatch.setattr("sys.stdout", None)  # as `>&-` in a shell
    assert main(["partition", str(tmp_path / "path.npz"), "--parts", "1"]) == 0


def printed_to(stdout):
    """Return the status of a command that prints there, and its stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "varcomm", "simulate", "--machines"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


def test_a_closed_pipe_and_a_full_disk():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        assert printed_to(stdout) == (1, "")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as stdout:
            status, errors = printed_to(stdout)
        (line,) = errors.splitlines()
        assert status == 1
        assert line.startswith("python -m varcomm simulate: [Errno 28] ")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def has_ranks(folder, pid):
    return len(children(pid)) == 2


def has_parts(folder, pid):
    return any(path.name.startswith("parts") for path in folder.iterdir())


def has_printed(folder, pid):
    return "nodes, " in (folder / "said").read_text()


PARTITION = ["partition", "ring.npz", "--parts", "5000", "--method", "block", "--out", "parts"]
SIMULATE = ["simulate", "--grid", "400x800", "--ranks", "1,2,4,8,16,32,64,128"]


@pytest.mark.parametrize(
    ("arguments", "is_time"),
    [
        (["bench"], has_ranks),
        pytest.param(["doctor"], has_ranks, marks=pytest.mark.slow),
        (PARTITION, has_parts),
        pytest.param(SIMULATE, has_printed, marks=pytest.mark.slow),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else "",
)
def test_ctrl_c(arguments, is_time, tmp_path):
    if "ring.npz" in arguments:
        ring = np.stack([np.arange(100_000), np.roll(np.arange(100_000), 1)])
        np.savez(tmp_path / "ring.npz", edge_index=ring)
    with (tmp_path / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.PIPE,
            text=True,
        )
    deadline = time.monotonic() + 90
    while not is_time(tmp_path, process.pid):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert not any(map(is_alive, ranks))
    assert process.returncode == 130
    assert errors == f"python -m varcomm {arguments[0]}: interrupted\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"ring.npz", "said"}
