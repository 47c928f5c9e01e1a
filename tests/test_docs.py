"""The code on the pages of the docs runs, on every rank from top to bottom."""

import re
from pathlib import Path

import pytest
import torch

PAGES = Path(__file__).parent.parent / "docs"


def run_page(rank, page, folder):
    names = {"rank": rank, "folder": folder}
    for block in re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.DOTALL):
        # as a module does, so that classes defined there know where they are
        exec(compile(block, page, "exec"), names)
    return {key: value for key, value in names.items() if isinstance(value, torch.Tensor)}


@pytest.mark.parametrize("page", ["graphs.md"])
def test_code_of_a_page(worlds, page, tmp_path):
    one, other = worlds.run(2, run_page, page, tmp_path / "saved")
    assert torch.isfinite(one["loss"])
    assert one["mean"] == other["mean"]
    assert torch.equal(one["logits"], other["logits"])
    assert one["out"].shape[1] == 1
    assert len(one["out"]) + len(other["out"]) == 60
