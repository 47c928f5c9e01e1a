"""Each example runs with --smoke on ranks, and by the command of its README."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.examples.loading import EXAMPLES, example

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


TRAINED = [folder for folder in FOLDERS if folder != "resume"]  # has its own


def run_main(rank, folder, arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bars
    ):
        code = example(folder, "train").main(arguments)
    return code, printed.getvalue()


@pytest.mark.parametrize("folder", TRAINED)
def test_smoke_on_ranks(worlds, folder, tmp_path):
    path = tmp_path / "a folder" / "picture.png"
    (code, printed), *others = worlds.run(3, run_main, folder, ["--smoke", "--picture", str(path)])
    assert not code
    assert [text for _, text in others] == ["", ""], "only the first rank prints"
    assert re.search(r"\d s a step, the median of \d+; at most .* MiB a rank", printed)
    assert f"picture: {path}" in printed
    assert path.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("folder", TRAINED)
def test_the_command_of_the_readme(folder, tmp_path):
    (tmp_path / "examples").symlink_to(EXAMPLES)
    environ = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [*command(folder), "--smoke"],
        env=environ | {"OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "a step, the median of" in done.stdout
    drawn = re.search(r"picture: (.*)", done.stdout)
    assert (tmp_path / drawn[1]).stat().st_size > 10_000


# options that an example refuses: each begins with the name of the option
REFUSED = [
    ("ocean", ["--spacing", "7"]),
    ("ocean", ["--check", "60"]),
    ("ocean", ["--steps", "0"]),
    ("ocean", ["--picture", "ocean.foo"]),
    ("ocean", ["--picture", f"{__file__}/ocean.png"]),
    ("ocean_3d", ["--resolution", "7"]),
    ("ocean_3d", ["--levels", "1"]),
    ("text", ["--head-size", "5"]),
    ("text", ["--length", "20000"]),
    ("three_ways", ["--mesh", "2x2x1"]),
    ("three_ways", ["--mesh", "1x2"]),
    ("three_ways", ["--mesh", "0x3x1"]),
    ("three_ways", ["--batch", "1000000"]),
    ("resume", ["--side", "-3", "folder"]),
]


def refusals(rank, folder):
    messages = []
    for name, arguments in REFUSED:
        picture = [] if name == "resume" else ["--picture", f"{folder}/picture.png"]
        with (
            contextlib.redirect_stderr(io.StringIO()) as printed,
            pytest.raises(SystemExit, match=r"^2$"),
        ):
            example(name, "train").main([*picture, *arguments])
        messages.append(printed.getvalue())
    return messages


def test_wrong_options_are_printed_once(worlds, tmp_path):
    messages, *others = worlds.run(3, refusals, str(tmp_path))
    for (_, (option, *_)), text in zip(REFUSED, messages, strict=True):
        assert f"{option}: " in text
    assert others == [[""] * len(REFUSED)] * 2


def differing(rank, folder):
    train = example("text", "train")
    before, train.compare = train.compare, lambda *args: (0.0, 1e-2)
    try:
        small = ["--layers", "1", "--head-size", "4", "--length", "16", "--batch", "2"]
        more = ["--steps", "1", "--sample", "1", "--check", "3", "--picture", f"{folder}/a.png"]
        return run_main(rank, "text", [*small, *more])
    finally:
        train.compare = before


def test_a_difference_from_one_process_is_a_failure(worlds, tmp_path):
    ((code, printed),) = worlds.run(1, differing, tmp_path)
    assert code == 1
    assert printed.endswith("\nNOT one answer\n")
