"""What the page on the command line shows is what is printed, where that is the same everywhere."""

import re
from pathlib import Path

import pytest

from varcomm.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text()


def test_the_example(monkeypatch, tmp_path, capsys):
    pytest.importorskip("meshio")
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "command_line.md", "exec"), {})
    shown = re.findall(r"```console\n\$ varcomm (.*?)\n(.*?)```", PAGE, re.DOTALL)
    same = [(line, text) for line, text in shown if "channel" in line and "altered" not in text]
    assert [line.split()[0] for line, _ in same] == ["partition", "inspect"]
    for line, text in same:
        assert main(line.split()) == 0
        assert capsys.readouterr().out == text
