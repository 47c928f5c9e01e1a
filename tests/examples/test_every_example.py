"""Each example runs with --smoke on ranks, and by the command of its README."""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
from PIL import Image

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


def words_of(folder):
    """Return the words of an example's picture and of its twin, as `dark.save` wrote them."""
    paths = [EXAMPLES / folder / f"{folder}{part}.png" for part in ("", "-dark")]
    light, dark = (Image.open(path).text["Description"].splitlines() for path in paths)
    assert light == dark
    return light


def test_pictures_have_the_errors_of_their_pages():
    page = (EXAMPLES / "poisson" / "README.md").read_text()
    (error,) = re.findall(r"^ +([\d.]+)  network$", page, re.MULTILINE)
    assert f"16 solutions: {error} % (dashed)" in words_of("poisson")
    page = (EXAMPLES / "points" / "README.md").read_text()
    row = r"^ +(\d+) +([\d.]+)  (?:MeshGraphNet|Transolver)$"
    hours, errors = zip(*re.findall(row, page, re.MULTILINE), strict=True)
    assert len(errors) == 4
    words = words_of("points")
    assert {f"{step} h" for step in hours} <= {*words}
    assert sorted(errors) == sorted(word for word in words if re.fullmatch(r"\d+\.\d", word))


def run_main(rank, folder, arguments):
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        contextlib.redirect_stderr(io.StringIO()),  # the bars
    ):
        code = example(folder, "train").main(arguments)
    return code, printed.getvalue()


# `--check` compares losses and gradients with one process, in fp64 and fp32; the example fails if
# they differ. The test of `resume` is its own.
TEXT = "text --layers 1 --head-size 4 --length 16 --batch 2 --sample 20 --steps 1 --check 5"
CHECKED = ["atoms --smoke --cells 4 --check", "ocean --smoke --steps 1 --check 5"]
CHECKED += ["poisson --smoke --check", TEXT, "adaptive --smoke --check"]
CHECKED += ["dynamics --smoke --cells 2 --network --check"]
CHECKED += ["weather_grid --smoke --check"]
CHECKED += ["points --smoke --spacing 10 --hours 1 3 --steps 1 --check"]
NODES = "nodes --smoke --models gcn --check"
SAMPLED = "nodes --smoke --models sage --sampled --cache 0 --check"
FIRST = ["adaptive --smoke --check", "weather --smoke"]
MESHES = {1: "1x1x1", 2: "2x1x1 1x2x1 1x1x2", 4: "1x2x2 2x2x1 2x1x2", 5: "1x5x1 1x1x5 5x1x1"}
SLOW_RUNS = [(ranks, line) for ranks in (1, 2, 5) for line in CHECKED]
SLOW_RUNS += [(3, line) for line in CHECKED if line not in FIRST]
SLOW_RUNS += [(3, NODES), (2, SAMPLED), (3, f"{TEXT} --sequence-parallel")]
SLOW_RUNS += [(3, "ocean_3d --smoke")]
SLOW_RUNS += [(3, "three_ways --smoke --mesh 1x3x1 1x1x3 --check 4")]
SLOW_RUNS += [(3, "nodes --smoke --sampled --check"), (2, f"{TEXT} --sequence-parallel")]
SLOW_RUNS += [(4, "weather_grid --smoke --mesh 2x2 --check")]
SLOW_RUNS += [(n, f"three_ways --smoke --mesh {m} --check 4") for n, m in MESHES.items()]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ranks", "line"),
    [(3, line) for line in FIRST]
    + [pytest.param(*run, marks=pytest.mark.slow) for run in SLOW_RUNS],
)
def test_training_on_ranks(worlds, ranks, line, tmp_path):
    (folder, *words), path = line.split(), tmp_path / "a folder" / "picture.png"
    (code, printed), *others = worlds.run(
        ranks, run_main, folder, [*words, "--picture", str(path)], timeout=240
    )
    assert not code, printed
    assert ("\none answer\n" in printed) == ("--check" in words)
    assert [text for _, text in others] == [""] * (ranks - 1), "only the first rank prints"
    assert re.search(r"\d s per step, the median of \d+; at most .* MiB per rank", printed)
    assert f"picture: {path}" in printed
    for picture in (path, path.with_stem("picture-dark")):
        assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "resume"])
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
    assert "per step, the median of" in done.stdout
    drawn = re.search(r"picture: (.*)", done.stdout)
    assert (tmp_path / drawn[1]).stat().st_size > 10_000


# The first option of each line is wrong, and in the message.
REFUSED = [
    *("ocean --spacing 7", "ocean --check 60", "ocean --steps 0", "ocean --picture ocean.foo"),
    *(f"ocean --picture {__file__}/ocean.png", "ocean_3d --resolution 7", "ocean_3d --levels 1"),
    *("text --head-size 5", "text --length 20000", "three_ways --mesh 2x2x1"),
    *("three_ways --mesh 1x2", "three_ways --mesh 0x3x1", "three_ways --batch 1000000"),
    *("weather_grid --hidden 6", "weather_grid --mesh 2x2"),
    *("points --spacing 0.5", "points --hours 0", "resume --side -3 folder"),
]


def refusals(rank, folder):
    messages = []
    for line in REFUSED:
        name, *words = line.split()
        picture = [] if name == "resume" else ["--picture", f"{folder}/picture.png"]
        with (
            contextlib.redirect_stderr(io.StringIO()) as printed,
            pytest.raises(SystemExit, match=r"^2$"),
        ):
            example(name, "train").main([*picture, *words])
        messages.append(printed.getvalue())
    return messages


def test_wrong_options_are_printed_once(worlds, tmp_path):
    messages, *others = worlds.run(3, refusals, str(tmp_path))
    for line, message in zip(REFUSED, messages, strict=True):
        assert f"{line.split()[1]}: " in message
    assert others == [[""] * len(REFUSED)] * 2
