"""Functions of fields equal those of torch on the whole tensor, to the second derivative."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import varcomm as vc
from tests.grid.comparing import ROWS_ONLY, compare
from tests.grid.functions import FUNCTIONS, M, N
from tests.worlds import on_ranks

NAMES = [*FUNCTIONS]
OF_ALL = 3  # torch refuses the sizes of this seed for none of them


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("name", NAMES)
def test_torch_runs_each_function_of_the_sweep(name):
    """The sweep leaves out sizes that torch refuses; it must not refuse all."""
    shape, function, parameters = FUNCTIONS[name]
    lengths = {N: 12, M: 8}
    x = torch.randn([lengths.get(n, n) for n in shape], dtype=torch.float64)
    function(x, *[torch.randn(p, dtype=torch.float64) for p in parameters])


@pytest.mark.parametrize("names", [NAMES[at::6] for at in range(6)], ids=lambda names: names[0])
@on_ranks(3)
def test_functions(rank, names):
    torch.set_num_threads(1)
    return [line for name in names if (line := compare(name, OF_ALL, [3]))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@on_ranks(1, 2, 3, 5)
def test_functions_of_many_sizes(rank, name, ranks):
    torch.set_num_threads(1)
    return [line for seed in range(22) if (line := compare(name, seed, [ranks]))]


JOINED = "windows", "attention of pixels"  # refused: a reshape joins rows and columns
OF_TWO_DIMENSIONS = [
    name
    for name, (shape, *_) in FUNCTIONS.items()
    if M in shape and name not in (*ROWS_ONLY, *JOINED)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_TWO_DIMENSIONS)
@on_ranks(4)
def test_functions_on_a_mesh(rank, name):
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    return [line for seed in range(6) if (line := compare(name, seed, [2, 2], mesh))]


def test_the_page_lists_every_function_once():
    docs = Path(__file__).parents[2] / "docs"
    made = runpy.run_path(str(docs / "make_grid_functions.py"))["page"]()
    page = (docs / "reference" / "grid_functions.md").read_text()
    assert page == made, "run: python docs/make_grid_functions.py"
    listed = re.findall(r"`(\w+)`", " ".join(re.findall(r"^`\w+`,.*", page, re.MULTILINE)))
    assert sorted(listed) == vc.grid.functions()


FIRST_IN_INFERENCE = ["bilinear", "bicubic", "nearest-exact", "area", "conv2d", "windows", "rows"]


@on_ranks(3)
def test_a_first_call_in_inference_mode_leaves_training_as_it_was(rank):
    for name in FIRST_IN_INFERENCE:
        shape, function, parameters = FUNCTIONS[name]
        x = torch.ones([{N: 29, M: 23}.get(n, n) for n in shape], dtype=torch.float64)
        made = [torch.ones(p, dtype=x.dtype, requires_grad=True) for p in parameters]
        grid = vc.grid.Grid(x.shape[2:], sizes=[[20, 0, 9], None])
        with torch.inference_mode():
            expected = function(grid.scatter(x), *made).gather()
        field = grid.scatter(x.requires_grad_())
        out = function(field, *made)
        assert torch.equal(out.gather(), expected), name
        out.square().sum().backward()
