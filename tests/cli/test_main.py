"""What all commands have alike: how they are called, what they end with, and Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import varcomm as vc
from tests.graph.graphs import wild
from varcomm.cli.main import main

ROOT = Path(__file__).parents[2]
COMMANDS = ("doctor", "partition", "inspect", "simulate", "bench")
# A shell that starts something in the background lets it ignore Ctrl-C; here it must not.
START = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from varcomm.cli.main import main; sys.exit(main())"
)


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    listed = [line.split()[0] for line in told.splitlines() if line.startswith("    ")]
    assert listed == list(COMMANDS)
    assert "status: 0 all is well, 1 it failed, 2 it was called wrongly, 130 Ctrl-C" in told


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    ("called", "prog"),
    [("/usr/bin/varcomm", "varcomm"), ("/site/varcomm/__main__.py", "python -m varcomm")],
)
def test_examples_are_for_how_it_was_called(name, called, prog, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [called])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit, match="0"):
        main([name, "--help"])
    told = capsys.readouterr().out
    assert told.startswith(f"usage: {prog} {name} ")
    assert f"\nexample:\n  {prog} {name} " in told
    assert max(map(len, told.splitlines())) <= 80


def test_without_a_stdout(monkeypatch, tmp_path):
    np.savez(tmp_path / "path.npz", edge_index=[[0, 1], [1, 2]])
    monkeypatch.setattr("sys.stdout", None)  # as by `>&-`
    assert main(["partition", str(tmp_path / "path.npz"), "--parts", "1"]) == 0


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out.strip()


def test_no_such_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["cure"])
    assert "invalid choice: 'cure'" in capsys.readouterr().err


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def interrupted(folder, arguments, is_time):
    """Start a command, press Ctrl-C when it is time, and return its status and what it said."""
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=subprocess.PIPE,
            text=True,
        )
    deadline = time.monotonic() + 90
    while not is_time(process.pid):
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    ranks = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert not any(map(is_alive, ranks))
    return process.returncode, errors


def has_said(folder, text):
    return lambda pid: text in (folder / "said").read_text()


def test_doctor_ends_with_its_ranks(tmp_path):
    status, errors = interrupted(tmp_path, ["doctor"], lambda pid: len(children(pid)) == 2)
    assert (status, errors) == (130, "python -m varcomm doctor: interrupted\n")


def test_partition_leaves_nothing_behind(tmp_path):
    edges = np.stack([np.arange(100_000), np.roll(np.arange(100_000), 1)])
    np.savez(tmp_path / "ring.npz", edge_index=edges)
    arguments = ["partition", "ring.npz", "--parts", "5000", "--method", "block", "--out", "parts"]
    status, errors = interrupted(
        tmp_path, arguments, lambda pid: any(tmp_path.rglob("rank-00003.safetensors"))
    )
    assert (status, errors) == (130, "python -m varcomm partition: interrupted\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ring.npz", "said"]


def test_simulate(tmp_path):
    arguments = ["simulate", "--grid", "400x800", "--ranks", "1,2,4,8,16,32,64,128"]
    status, errors = interrupted(tmp_path, arguments, has_said(tmp_path, "nodes, "))
    assert (status, errors) == (130, "python -m varcomm simulate: interrupted\n")


def test_bench_ends_with_its_ranks(tmp_path):
    status, errors = interrupted(
        tmp_path, ["bench", "--no-peers"], lambda pid: len(children(pid)) == 2
    )
    assert (status, errors) == (130, "python -m varcomm bench: interrupted\n")


def test_inspect(monkeypatch, tmp_path, capsys):
    vc.simulate.partition(wild(), 2, "block").save(tmp_path / "parts")

    def press(*arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("varcomm.graph.files.outline.Outline.read_part", press)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect", str(tmp_path / "parts")]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    told = capsys.readouterr()
    assert (told.out, told.err) == ("", "python -m varcomm inspect: interrupted\n")


def printed_to(stdout):
    """Return the status of a command that prints there, and what it says on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "varcomm", "simulate", "--machines"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    return done.returncode, done.stderr


def test_a_reader_who_has_left_is_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as stdout:
        assert printed_to(stdout) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_line():
    with open("/dev/full", "w") as stdout:
        status, errors = printed_to(stdout)
    assert status == 1
    (line,) = errors.splitlines()
    assert line.startswith("python -m varcomm simulate: [Errno 28] ")
