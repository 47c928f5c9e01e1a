"""Every operation under every transform: it works as in one process, or is refused."""

import pytest
import torch

import varcomm
from tests.ops.primitives import PRIMITIVES, Setting, case
from tests.transforms.layers import LAYERS
from tests.transforms.transforms import TRANSFORMS, Operation
from tests.worlds import on_ranks
from varcomm import ShardSizes

PLANS = [name for name in PRIMITIVES if "_from_" in name]
CALLS = [name for name in PRIMITIVES if name not in PLANS]
# by the columns of the page; shard_v has nothing to wait for
OPERATIONS = {
    "primitives": CALLS,
    "with `async_op=True`": [name for name in CALLS if name != "shard_v"],
    "`ExchangePlan`": PLANS,
    **{column: list(cases) for column, cases in LAYERS.items()},
}
# Operations that are run in every test; the others are slow.
QUICK = {
    "primitives": ("all_gather_v", "broadcast", "indexed_all_to_all_v"),
    "with `async_op=True`": ("all_gather_v", "scatter_v"),
    "`ExchangePlan`": ("plan_from_needed",),
    "halo exchange": ("with_halo",),
}
NEVER = ("`torch.func.vmap`", "`torch.func.hessian`", "`torch.jit.trace`")
# Refused, or refused by torch of the same model in one process.
REFUSED = {
    "`torch.func.linearize`": ("distributed models", "cross entropy"),
    "`FakeTensorMode()`": ("distributed models",),
    "`FakeTensorMode(allow_non_fake_inputs=True)`": ("distributed models",),
    **dict.fromkeys(NEVER, tuple(OPERATIONS)),
    "`torch.export` on one rank, `strict=False`": ("distributed models",),
    "`torch.export` on one rank, `strict=True`": ("distributed models",),
}
CASES = [
    (column, name)
    if name in QUICK.get(column, ())
    else pytest.param(column, name, marks=pytest.mark.slow)
    for column, names in OPERATIONS.items()
    for name in names
]


def check(rank, ranks, column, name):
    """Return the transforms that failed otherwise than by a refusal."""
    torch.set_num_threads(1)
    failed = []
    for title, transform in TRANSFORMS.items():
        if ("one rank" in title) != (ranks == 1):
            continue
        refused = column in REFUSED.get(title, ())
        try:
            if column in LAYERS:
                made = LAYERS[column][name](Setting(ShardSizes.balanced(11, ranks)))
            else:
                made = case(name, "off by one", ranks)
            transform(Operation(made, rank, "async" in column))
        except varcomm.ArgumentError as error:
            if not refused:
                failed.append(f"{title}: {error}")
        except Exception as error:
            if column != "distributed models" or not refused:
                failed.append(f"{title}: {type(error).__name__}: {error}")
        else:
            if title in NEVER and not (name == "shard_v" and "func" in title):  # a view
                failed.append(f"{title}: not refused")
    return failed


@pytest.mark.parametrize(("column", "name"), CASES)
def test_transforms(worlds, column, name):
    ranks = 3 if column in ("primitives", "`ExchangePlan`") else 2
    assert worlds.run(ranks, check, ranks, column, name) == [[]] * ranks


@pytest.fixture(scope="module")
def one():
    """A rank of its own: exporting leaves the compiler in its process."""
    with varcomm.Ranks(1, timeout=100) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "name"), [(column, name) for column, names in OPERATIONS.items() for name in names]
)
def test_export(one, column, name):
    assert one.run(check, 1, column, name) == [[]]


BATCHED = {
    "all_reduce": varcomm.all_reduce,
    "a handle": lambda x: varcomm.all_reduce(x, async_op=True).wait(),
    "a linear": lambda x: varcomm.tensor_parallel.column_parallel_linear(x, torch.eye(2)),
}


@pytest.mark.parametrize("name", BATCHED)
@on_ranks(1, 3)
def test_batches_of_gradients_are_refused(rank, name):
    """As by jacobian(vectorize=True), in which a message would read memory that is not there."""
    x = torch.ones(2, requires_grad=True)
    for _ in range(2):
        y = BATCHED[name](x)
        with pytest.raises(varcomm.ArgumentError, match="vmap"):
            torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
