"""All commands: help, wrong options, output that cannot be written, and Ctrl-C."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.transport.processes import all_end
from varcomm.cli.main import main

ROOT = Path(__file__).parents[2]
PROG = "python -m varcomm"
COMMANDS = ("doctor", "partition", "check", "inspect", "simulate", "bench")
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
    def shown(*arguments):
        with pytest.raises(SystemExit, match="0"):
            main([*arguments])
        return capsys.readouterr().out

    monkeypatch.setattr("sys.argv", [path])
    monkeypatch.setenv("COLUMNS", "80")
    assert shown("--version").strip()
    page = shown("--help")
    listed = [line.split()[0] for line in page.splitlines() if line.startswith("    ")]
    assert listed == list(COMMANDS)
    assert "exit status: 0 success, 1 failure, 2 usage error, 130 Ctrl-C" in page
    for name in COMMANDS:
        page = shown(name, "--help")
        assert page.startswith(f"usage: {prog} {name} ")
        assert f"\nexample:\n  {prog} {name} " in page
        assert max(map(len, page.splitlines())) <= 80


# The last option of each line is wrong, and in the message.
WRONG = [
    *("partition ring.npz --parts 0", "partition ring.npz --parts few"),
    "partition a.npz --parts 2 --method scissors",
    *("partition a.npz --parts 2 --plot p.bmp", "partition a.npz --parts 2 --foo"),
    *("simulate --machine abacus", "simulate --ranks few", "simulate --width 0"),
    *("simulate --grid \u00b2x5", "bench --engine ucx"),
    *("bench --world 2,0", "bench --sizes 1T", "bench --sizes 0", "bench --sizes 1.5K"),
    *(f"bench --sizes {'9' * 5000}", "bench --skews 8", "bench --skews 0:0"),
    *("bench --dtypes int64", "bench --operations gather", "bench --repeat none"),
]
CASES = [(line, re.findall("--[a-z]+", line)[-1]) for line in WRONG]
CASES += [("cure", "'cure'"), ("partition ring.npz", "--parts")]
CASES += [("simlate", "did you mean simulate?")]
CASES += [("partition a.npz --parts 2 --method metiss", "did you mean metis?")]
CASES += [("bench --json /", "/ cannot be written"), ("bench --json /none/at/all", "/none/at/all")]
if not torch.cuda.is_available():
    CASES.append(("bench --engine nccl", "--engine"))


def test_usage_errors(capsys):
    for line, named in CASES:
        with pytest.raises(SystemExit) as ended:
            main(line.split())
        assert ended.value.code == 2, line
        shown = capsys.readouterr()
        usage, _, message = shown.err.partition("error:")
        assert named in message, line
        if (name := line.split()[0]) in COMMANDS:
            assert usage.startswith(f"usage: {PROG} {name} "), line
        assert shown.out == ""


def test_help_without_arguments(capsys):
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"usage: {PROG} [-h]")
    assert "partition    cut a graph" in shown.err
    assert shown.out == ""


def test_without_a_stdout(monkeypatch, tmp_path):
    np.savez(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]])
    monkeypatch.setattr("sys.stdout", None)  # as `>&-` in a shell
    assert main(["partition", str(tmp_path / "path.npz"), "--parts", "1"]) == 0


def started(*words, environ=(), **more):
    """Start Python with the library in its path; stderr is text."""
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | dict(environ)
    return subprocess.Popen(
        [sys.executable, *words], env=environ, stderr=subprocess.PIPE, text=True, **more
    )


@pytest.mark.slow
def test_a_closed_pipe_and_a_full_disk(tmp_path):
    np.savez(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]])
    command = ("-m", "varcomm", "partition", str(tmp_path / "path.npz"), "--parts", "1")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        process = started(*command, stdout=stdout)
    assert (process.communicate()[1], process.returncode) == ("", 1)
    with open("/dev/full", "w") as stdout:
        process = started(*command, stdout=stdout)
    (line,) = process.communicate()[1].splitlines()
    assert process.returncode == 1
    assert line.startswith("python -m varcomm partition: [Errno 28] ")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ranks(folder, pid):
    # both serve: one that is forked just now belongs to nobody yet
    return len([*folder.glob("temporary/varcomm-*/stack-*")]) == 2


def has_parts(folder, pid):
    return any(path.name.startswith("parts") for path in folder.iterdir())


def has_printed(folder, pid):
    return "nodes, " in (folder / "said").read_text()


@pytest.mark.parametrize(
    ("line", "is_time"),
    [
        ("bench", has_ranks),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("partition ring.npz --parts 5000 --method block --out parts", has_parts),
                ("doctor", has_ranks),
                ("simulate --grid 400x800 --ranks 1,2,4,8,16,32,64,128", has_printed),
            )
        ),
    ],
)
def test_ctrl_c(line, is_time, tmp_path):
    ring = np.stack([np.arange(100_000), np.roll(np.arange(100_000), 1)])
    np.savez(tmp_path / "ring.npz", edge_index=ring)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    more = {"environ": {"TMPDIR": str(temporary)}, "cwd": tmp_path}
    with (tmp_path / "said").open("wb") as said:
        process = started("-c", START, *line.split(), stdout=said, **more)
    deadline = time.monotonic() + 90
    while not is_time(tmp_path, process.pid):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert all_end(ranks, within=0)
    assert process.returncode == 130
    assert errors == f"python -m varcomm {line.split()[0]}: interrupted\n"
    assert {path.name for path in tmp_path.iterdir()} <= {"ring.npz", "said", "temporary"}
    assert not [*temporary.glob("varcomm-*")]
