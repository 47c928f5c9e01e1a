"""The code on the pages and in the README runs, and prints what its comments say.

The first tier runs the README and the start page, the second tier all pages.
"""

import ast
import builtins
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from page_code import blocks_of, run
from torch.distributed.tensor import DTensor

import varcomm as vc
from tests.docs.test_how_to import on_page

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXPLANATIONS = [
    *(page for page in sorted(DOCS.glob("explanation/*.md")) if blocks_of(page)),
    *(page for page in sorted(DOCS.glob("coming_from/*.md")) if page.stem not in ("index", "mace")),
    *(DOCS / f"{page}.md" for page in ("ase", "faq", "install", "sampling", "sharp_bits", "why")),
    DOCS / "reference" / "environment_variables.md",
]


TRAINING, CHECKED, SCRIPT, PARALLEL = blocks_of(ROOT / "README.md")


def comments_of(block):
    """Return the comments below calls of `print`: the lines that these calls print."""
    lines, printing = [], False
    for line in block.splitlines():
        if line.startswith("#"):
            assert printing, f"nothing is printed above {line!r}"
            lines.append(line.removeprefix("#").removeprefix(" "))
        else:
            printing = line.startswith(("print(", "    print(")) or (printing and not line)
    return "\n".join(lines)


@pytest.mark.usefixtures("launch_on_worlds")
def test_start():
    test_pages_that_explain(DOCS / "start.md")


@pytest.mark.slow
@pytest.mark.usefixtures("launch_on_worlds")
@pytest.mark.parametrize("page", EXPLANATIONS, ids=lambda page: page.stem)
def test_pages_that_explain(page):
    assert blocks_of(page)
    names = {"__name__": "__main__"}  # so that functions travel to the ranks by value
    for block in blocks_of(page):
        assert ("print(" in block) == bool(comments_of(block)), block
        assert run(block, names) == comments_of(block)


@pytest.mark.slow
@pytest.mark.usefixtures("launch_on_worlds")
@pytest.mark.filterwarnings("ignore")
def test_mace():
    pytest.importorskip("mace")
    test_pages_that_explain(DOCS / "coming_from" / "mace.md")


def run_page(rank, page, folder):
    """Return the tensors that the blocks of a page make."""
    names = {"rank": rank, "folder": folder}
    for block in blocks_of(DOCS / page):
        run(block, names)
    tensors = {key: value for key, value in names.items() if isinstance(value, torch.Tensor)}
    special = DTensor, vc.grid.Field
    return {key: value for key, value in tensors.items() if not isinstance(value, special)}


def check_graphs(one, other):
    assert torch.isfinite(one["loss"])
    assert one["out"].shape[1] == 1
    assert len(one["out"]) + len(other["out"]) == 60


def check_grids(one, other):
    torch.testing.assert_close(one["whole"], one["alone"])
    torch.testing.assert_close(one["encoded"], one["expected"])
    assert torch.equal(one["loaded"], one["file"][0:1])


def check_moving_graphs(one, other):
    for found in (one, other):
        assert torch.equal(found["temperature"], torch.tensor([1.0, 1, 3, 3]))
        assert torch.equal(found["shared"], torch.tensor([0.5, 0.5, 1.5, 1.5]))
        assert torch.equal(found["gradient"], 2 * found["x"])
    assert (len(one["whole"]), len(other["whole"])) == (64, 0)


def check_tensor_parallelism(one, other):
    assert (one["part"].shape, other["part"].shape) == ((4, 2, 8), (2, 2, 8))
    assert one["logits"].shape[-1] + other["logits"].shape[-1] == 131
    for found in (one, other):
        torch.testing.assert_close(found["loss"], found["expected"])
    for expected in (other["answer"], one["unfused"]):
        torch.testing.assert_close(one["answer"], expected)


def check_checkpoints(one, other):
    assert one["weight"].any(dim=1).all()
    assert torch.equal(torch.cat([other["again"], one["again"]]), one["whole"])


def check_gradients(one, other):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    model(torch.arange(12.0).view(4, 3)).square().sum().div(4).backward()
    torch.testing.assert_close(one["mean"], model[0].weight.grad)


def check_dtensors(one, other):
    for found in (one, other):
        assert torch.equal(found["everything"], found["rows"])
        torch.testing.assert_close(found["output"], found["expected"])
        torch.testing.assert_close(found["gradient"], found["wanted"])
    assert (len(one["own"]), len(other["own"])) == (1, 4)
    assert (len(one["back"]), len(other["back"])) == (3, 2)


def check_neighbours(one, other):
    total = one["forces"].sum(0) + other["forces"].sum(0)
    torch.testing.assert_close(total, torch.zeros_like(total), rtol=0, atol=1e-9)


# A check of the tensors on 2 ranks, and the tensors that are equal on both.
GUIDES = {
    "graphs.md": (check_graphs, ["mean", "logits"]),
    "grids.md": (check_grids, ["whole", "encoded"]),
    "moving_graphs.md": (check_moving_graphs, []),
    "tensor_parallel.md": (check_tensor_parallelism, ["norm", "kept"]),
    "checkpoints.md": (check_checkpoints, ["whole", "weight"]),
    "gradients.md": (check_gradients, ["mean", "weight", "up"]),
    "neighbours.md": (check_neighbours, ["energy"]),
    "dtensor.md": (check_dtensors, ["of_weight", "summed"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("page", GUIDES)
def test_guides(worlds, page, tmp_path):
    one, other = worlds.run(2, run_page, page, tmp_path / "saved")
    check, equal = GUIDES[page]
    check(one, other)
    for name in equal:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.slow
def test_guide_to_compilation(tmp_path):
    """In ranks of its own: the compiler stays in a process."""
    one, other = vc.launch(run_page, 2, "compile.md", tmp_path)
    assert torch.equal(one["loss"], other["loss"])
    assert one["shard"].shape[0] + other["shard"].shape[0] == 7
    assert one["bias"].tolist() == other["bias"].tolist() == [0.0] * 3


@pytest.mark.slow
def test_guide_to_simulation(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = run_page(0, "simulate.md", tmp_path)  # in this process
    assert found["rows"].shape == (512, 512)
    assert len(found["sent"]) == len(found["memory"]) == 512
    assert found["memory"].min() > 0


@pytest.mark.parametrize(
    "tutorial", sorted(DOCS.glob("tutorials/*.py")), ids=lambda page: page.stem
)
def test_tutorials_import_installed_packages(tutorial):
    """A tutorial that is downloaded runs in an empty folder."""
    nodes = list(ast.walk(ast.parse(tutorial.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    roots = {name.partition(".")[0] for name in names}
    assert [root for root in roots if importlib.util.find_spec(root) is None] == []


@pytest.mark.parametrize(
    "tutorial", sorted(DOCS.glob("tutorials/*.py")), ids=lambda page: page.stem
)
def test_tutorials_show_the_code_that_shown_code_uses(tutorial):
    """No shown line uses a hidden name; imports and ``plt.show()`` of pictures are hidden."""
    hidden = r"# sphinx_gallery_start_ignore\n.*?# sphinx_gallery_end_ignore\n"
    shown = ast.parse(re.sub(hidden, "", tutorial.read_text(), flags=re.DOTALL))
    imports = [each for each in shown.body if isinstance(each, ast.Import | ast.ImportFrom)]
    imported = {(a.asname or a.name).partition(".")[0] for each in imports for a in each.names}
    used, defined = set(), imported | set(dir(builtins))
    for node in ast.walk(shown):
        match node:
            case ast.Name(name, ast.Load()):
                used.add(name)
            case ast.Name(name) | ast.arg(name) | ast.ExceptHandler(name=str(name)):
                defined.add(name)
            case ast.FunctionDef(name) | ast.ClassDef(name):
                defined.add(name)
    assert imported <= used
    assert used <= defined
    assert "plt" not in used


def output_of(script):
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def check_readme(output_of):
    assert output_of(SCRIPT).strip() == "[True, True, True]"
    printed = output_of(PARALLEL).strip()
    assert f"# {printed}" in PARALLEL
    assert printed.count("True") == 3
    losses = output_of(TRAINING).splitlines()
    assert "".join(f"# {line}\n" for line in losses) in TRAINING
    assert len(losses) == 3


@pytest.mark.usefixtures("launch_on_worlds")
def test_readme():
    check_readme(lambda script: run(script, {"__name__": "__main__"}))


@pytest.mark.slow
def test_readme_as_scripts():
    """As a reader copies them, without a guard around the call of ``launch``."""
    check_readme(output_of)


def test_first_pages():
    """The first page of the site has the README's block, and the README is short."""
    assert blocks_of(DOCS / "index.md") == [TRAINING]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.slow
def test_check_of_the_readme(tmp_path):
    shown = re.search(
        r"```text\n\$ (varcomm [^\n]*)\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    (tmp_path / "model.py").write_text(CHECKED)
    command = [sys.executable, "-m", *shown[1].split()]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 1, ran.stderr
    assert on_page(ran.stdout, tmp_path) == shown[2].strip()
