"""The first exchanges of a graph: another dtype or width on one rank is an error on all ranks."""

import pytest
import torch

import varcomm
from tests.graph.graphs import split_by, wild
from tests.graph.typed import drawn
from tests.worlds import on_ranks, refused_alike
from varcomm import DisagreementError
from varcomm.graph import partition, remap, transfer


def graph_of(way="a rank owns nothing"):
    data = wild()
    return partition(data, method=split_by(way, data.num_nodes, 3))


def remapped(graph):
    return remap(graph, graph, graph.owned_ids)


# what sends the rows of a graph's nodes
WAYS = {
    "with_halo": lambda g: g.with_halo,
    "with_halo of several": lambda g: lambda x: g.with_halo([g.x, x]),
    "halo": lambda g: g.halo,
    "transfer": lambda g: transfer(g, graph_of("random")),
    "remap": remapped,
    "with_halo, differentiated": lambda g: lambda x: g.with_halo(x.clone().requires_grad_()),
}
DTYPES = {
    "fp32 for int32": (torch.float32, torch.int32),
    "bf16 for fp16": (torch.bfloat16, torch.float16),
    "fp64 for complex64": (torch.float64, torch.complex64),
}
ONLY_FLOATS = {"remap", "with_halo, differentiated"}


@pytest.mark.parametrize("name", WAYS)
@on_ranks(3)
def test_another_dtype_or_width_on_one_rank(rank, name):
    for case, (right, wrong) in DTYPES.items():
        if name in ONLY_FLOATS and not (wrong.is_floating_point and right.is_floating_point):
            continue
        graph = graph_of()
        call = WAYS[name](graph)
        x = torch.ones(graph.num_owned, 4)
        given = x.to(wrong if rank == 1 else right)
        refused_alike(DisagreementError, lambda c=call, g=given: c(g), "dtype", "rank 1 has")
        assert call(x.to(right)) is not None, case  # the group works on
    graph = graph_of()
    call, rows = WAYS[name](graph), graph.num_owned
    given = torch.ones(rows, 4 if rank else 2, dtype=torch.float32)
    refused_alike(DisagreementError, lambda: call(given), "shape of a row")


@on_ranks(3)
def test_another_plan_or_dim_on_one_rank(rank):
    x = torch.ones(3, 3)
    data = drawn({"a": (9, 4)}, {("a", "one", "a"): 20, ("a", "two", "a"): 20})
    graph = partition(data, method={"a": torch.arange(9) % 3})
    other = graph["a", "two" if rank == 2 else "one", "a"]
    refused_alike(DisagreementError, lambda: other.with_halo(x), "exchange: ranks disagree on plan")
    edges = graph["a", "one", "a"]
    refused_alike(DisagreementError, lambda: edges.with_halo(x, dim=rank // 2), "disagree on dim")


@on_ranks(3)
def test_migrate_compares_all_rows(rank):
    graph = graph_of()
    owner = torch.full((graph.num_owned,), 1)
    for wrong in (torch.int32, torch.float64):
        rows = torch.ones(graph.num_owned, 3, dtype=wrong if rank == 1 else torch.float32)
        words = "ranks disagree on u of nodes", "rank 1 has"
        refused_alike(DisagreementError, lambda r=rows: graph.migrate(owner, {"u": r}), *words)
    rows = torch.ones(graph.num_owned, 2 + rank)
    refused_alike(DisagreementError, lambda: graph.migrate(owner, {"u": rows}), "rows of shape")


@on_ranks(3)
def test_later_calls_are_compared_at_the_next_sum(rank):
    graph, x = graph_of(), torch.ones(())
    call, rows = graph.with_halo, torch.ones(graph.num_owned, 4)
    for _ in range(4):
        call(rows)
    call(rows.to(torch.int32 if rank == 1 else torch.float32))
    with pytest.raises(DisagreementError, match="different calls"):
        varcomm.all_reduce(x)
    with varcomm.debug(), pytest.raises(DisagreementError, match="dtype"):
        call(rows.to(torch.int32 if rank == 1 else torch.float32))
