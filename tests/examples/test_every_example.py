"""Each example runs by the command of its README, with --smoke, in seconds."""

import os
import re
import resource
import shlex
import subprocess
import sys

import pytest

from tests.examples.loading import EXAMPLES

FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/README.md"))
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def command(folder):
    """Return the first command of the README, as words."""
    text = (EXAMPLES / folder / "README.md").read_text()
    line = re.search(r"^ {4}((?:torchrun|python) .*?)(?:\s+#.*)?$", text, re.MULTILINE)
    program, *words = shlex.split(line[1])
    return [*(TORCHRUN if program == "torchrun" else [sys.executable]), *words]


def test_each_folder_is_an_example():
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()} - {"__pycache__"}
    assert folders == set(FOLDERS)
    named = (EXAMPLES / "README.md").read_text()
    assert all(f"]({folder}/README.md)" in named for folder in FOLDERS)


def computed():
    """Seconds for which processors have worked for processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f != "resume"])  # has its own
def test_smoke(folder, tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    before = computed()
    done = subprocess.run(
        [*command(folder), "--smoke"],
        env=environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert computed() - before < 120, "a look takes 20 s on two cores with nothing else"
    assert "a step, the median of" in done.stdout
    drawn = re.search(r"picture: (.*)", done.stdout)
    assert (tmp_path / drawn[1]).stat().st_size > 10_000
