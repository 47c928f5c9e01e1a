"""The command that prints habits of style prints those of changed lines, and never fails."""

import subprocess
import sys
from pathlib import Path

COMMAND = Path(__file__).parents[2] / "docs" / "check_prose.py"
BEFORE = "# Title\n\nThe plan knows its rows.\n\n```python\nx = 'it tells a rank'\n```\n"
MODULE = '"""Module."""\n\n# a comment that gives\n# two lines\nraise ValueError("rows a rank")\n'


def run(*command, folder):
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout


def test_habits_of_changed_lines(tmp_path):
    git = "git", "-c", "user.name=a", "-c", "user.email=a@b.c"
    page = tmp_path / "page.md"
    page.write_text(BEFORE)
    run(*git, "init", "-q", "-b", "main", folder=tmp_path)
    run(*git, "add", ".", folder=tmp_path)
    run(*git, "commit", "-q", "-m", "pages: add one", folder=tmp_path)
    page.write_text(BEFORE + "\nA row stands\nonce more\nhere. Other rows are plain.\n")
    (tmp_path / "module.py").write_text(MODULE)
    printed = run(sys.executable, COMMAND, folder=tmp_path).splitlines()
    assert [line.split(": ")[0] for line in printed] == ["module.py:3", "module.py:5", "page.md:9"]
    assert printed[-1].endswith(": A row stands once more here.")
