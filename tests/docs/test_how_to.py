"""Each page of docs/how_to is one script, which prints what the page shows."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PAGES = sorted((Path(__file__).parents[2] / "docs" / "how_to").glob("*.md"))


def parts_of(page):
    """Return the extra packages of a page, and each script with its command and printed lines."""
    text = page.read_text()
    needs = re.match(r"<!-- needs: (.*?) -->", text)
    pattern = r"```python\n((?:(?!```).)*)```(?:(?!```).)*```text\n\$ (.*?)\n(.*?)```"
    found = re.findall(pattern, text, re.DOTALL)
    scripts = [(code, command, shown.strip()) for code, command, shown in found]
    assert scripts, f"{page.name} needs a script, and a text block that begins with its command"
    return needs[1].split() if needs else [], scripts


def on_page(printed, folder):
    """Return printed lines as a page shows them: without the folder, 84 columns wide."""
    lines = printed.replace(f"{folder}/", "").strip().splitlines()
    return "\n".join(
        line if len(line) <= 84 else textwrap.fill(line, 84, subsequent_indent="    ")
        for line in lines
    )


def test_index_lists_every_page():
    index = (PAGES[0].parent / "index.md").read_text()
    linked = set(re.findall(r"\]\((\w+\.md)\)", index))
    assert linked == {page.name for page in PAGES} - {"index.md"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.stem != "index"], ids=lambda page: page.stem
)
def test_page(page, tmp_path):
    needs, scripts = parts_of(page)
    for package in needs:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    for script, command, expected in scripts:
        ran = run(script, command, tmp_path)
        assert ran.returncode == 0, ran.stderr[-4000:]
        assert on_page(ran.stdout, tmp_path) == expected, ran.stderr[-2000:]


def run(script, command, folder):
    """Run a script in a folder by the command of its page."""
    program, *options, name = shlex.split(command)
    assert program in ("torchrun", "python", "mpiexec"), command
    (folder / name).write_text(script)
    launcher = [sys.executable]
    if program == "torchrun":
        launcher += ["-m", "torch.distributed.run", f"--master-port={20000 + os.getpid() % 20000}"]
    if program == "mpiexec":
        places = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        launcher = [shutil.which("mpiexec", path=places)]
        options = [sys.executable if option == "python" else option for option in options]
    return subprocess.run(
        [*launcher, *options, name],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
