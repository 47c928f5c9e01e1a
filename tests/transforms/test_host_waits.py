"""No call waits for a device once it has run: values of tensors stay where they are.

On a GPU each of these would stop the host until the stream is empty, and a CUDA graph refuses them.
Here the tensors are on the CPU, and a second call that looks at their values is an error.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import varcomm
from tests.gpu import scenarios
from tests.graph.graphs import split_by, wild
from tests.ops.primitives import PRIMITIVES, case
from varcomm.graph import distribute, partition

# Called in Python, some never reach the dispatcher.
CALLS = """
    item tolist numpy __array__ __bool__ __int__ __float__ __index__ __contains__ cpu equal allclose
    nonzero nonzero_static argwhere unique unique_consecutive masked_select is_nonzero tensor
    as_tensor from_numpy bincount
"""
OPERATORS = {
    "_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select",
    "_unique2", "unique_consecutive", "unique_dim", "bincount", "lift_fresh",
}  # fmt: skip


class HostWaitError(AssertionError):
    """A call looks at values."""


class _NoCalls(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        counts_rows = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in CALLS.split() or (counts_rows and isinstance(args[1], torch.Tensor)):
            raise HostWaitError(f"{name} of {args[0] if args else kwargs}")
        return func(*args, **(kwargs or {}))


class _NoOperators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in OPERATORS or (name == "_to_copy" and (kwargs or {}).get("device") is not None):
            raise HostWaitError(f"{func} of {args[0] if args else kwargs}")
        by_mask = name in ("index", "index_put_", "index_put")
        if by_mask and any(i is not None and i.dtype == torch.bool for i in args[1]):
            raise HostWaitError(f"{func} by a mask")
        return func(*args, **(kwargs or {}))


def without_waits(step):
    """Run a step twice, the second time without a look at values."""
    step()
    with _NoCalls(), _NoOperators():
        step()


# The root of these describes its tensor to the others, and indices of a single call are checked.
LOOK = {"scatter_v", "broadcast", "indexed_all_to_all_v"}


def primitives(rank, pattern, ranks):
    for name in sorted(PRIMITIVES.keys() - LOOK):
        c = case(name, pattern, ranks, 0)
        for dtype in (torch.float32, torch.bfloat16):
            x = c.input(rank, dtype).requires_grad_()
            op = c.bind(None)

            def step(op=op, x=x):
                y = op(x)
                torch.autograd.grad(y, x, torch.ones_like(y))

            try:
                without_waits(step)
            except HostWaitError as error:
                raise AssertionError(f"{name} of {dtype}: {error}") from error


@pytest.mark.parametrize("pattern", ["off by one", "one empty"])
def test_primitives_and_plans(worlds, pattern):
    worlds.run(3, primitives, pattern, 3)


# PyG finds the self loops of edges by a mask, at each call
MODELS = {
    "GCN": lambda: pyg.GCN(4, 6, 2, 2, add_self_loops=False),
    "SAGE": lambda: pyg.GraphSAGE(4, 6, 2, 2),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, add_self_loops=False),
    "Transformer": lambda: pyg.TransformerConv(4, 2),
}


def training(rank, ranks):
    graph = partition(wild(), method=split_by("a rank owns nothing", 24, ranks))
    for name, make in MODELS.items():
        torch.manual_seed(0)
        model = distribute(make().double(), graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(model=model, optimizer=optimizer):
            out = model(graph.x, graph.edge_index)
            loss = graph.mean(F.mse_loss(out, graph.y, reduction="none"))
            optimizer.zero_grad()
            loss.backward()
            varcomm.data_parallel.sum_gradients(model)
            optimizer.step()

        try:
            without_waits(step)
        except HostWaitError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_training_steps(worlds):
    worlds.run(3, training, 3)


# On a CPU the embedding sends distinct rows, which it counts, unless it is told otherwise.
TENSOR_PARALLEL = {
    "linears": scenarios.linears,
    "of a sequence": scenarios.linears_with_sequence_shards,
    "embedding": partial(scenarios.vocab_parallel_embedding, exchange="sum"),
    "rows of a sequence": partial(
        scenarios.vocab_parallel_embedding_with_sequence_shards, exchange="sum"
    ),
    "features": scenarios.feature_parallel_embedding,
    "loss": scenarios.vocab_parallel_cross_entropy,
    "head and loss": scenarios.linear_cross_entropy,
    "attention": scenarios.attention,
    "GPT": partial(scenarios.gpt, exchange="sum"),
}


def tensor_parallel(rank, ranks):
    for name, make in TENSOR_PARALLEL.items():
        step = make(torch.device("cpu"), rank, ranks)
        try:
            without_waits(step)
        except HostWaitError as error:
            raise AssertionError(f"{name}: {error}") from error


def test_tensor_parallel_layers(worlds):
    worlds.run(3, tensor_parallel, 3)


def looks(rank):
    x = torch.arange(3.0)
    for look in (
        lambda: x[0].item(),
        lambda: x.tolist(),
        lambda: bool(x[0] > 0),
        lambda: x.nonzero(),
        lambda: x[x > 1],
        lambda: x.cpu(),
        lambda: torch.tensor([1.0]),
        lambda: x.repeat_interleave(x.long()),
    ):
        with pytest.raises(HostWaitError):
            without_waits(look)


def test_what_is_an_error():
    looks(0)
