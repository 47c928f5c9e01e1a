"""Fields of partitioned graphs: saved as the whole, loaded by whatever rows a rank has then."""

import pytest
import torch
from torch_geometric.data import Data

from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import RowsById, load, read, save
from varcomm.graph import partition

N = 17
NAMES = ("float64", "bfloat16", "int32", "uint16", "uint64", "bool", "complex64")
DTYPES = [getattr(torch, name) for name in NAMES]


def whole(dtype, ids=slice(None)):
    return torch.arange(N * 6).view(N, 3, 2).remainder(7)[ids].to(dtype)


def state_of(rank, ranks, loading):
    """Rows in no order, of which the last rank but one has none; a graph's, without an order."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(int(loading)))
    owner = torch.arange(N) % max(1, ranks - 1)
    owner[owner == ranks - 2] = ranks - 1
    ids = order[owner == rank].to(torch.int32 if loading else torch.int64)
    made = torch.zeros_like if loading else torch.clone
    fields = {str(d): RowsById(made(whole(d, ids.long())), ids, N) for d in DTYPES}
    edges = torch.stack([torch.arange(N), (torch.arange(N) + 1) % N])
    method = torch.arange(N) * 5 % ranks
    graph = partition(Data(edge_index=edges, x=torch.arange(N * 1.0)), method=method)
    field = torch.nn.Parameter(made(10 * graph.x))
    state = {"none": RowsById(torch.zeros(0, 3), torch.zeros(0).long(), 0), "fields": fields}
    return state | {"graph": RowsById(field, graph.owned_ids, N)}, graph


def saved(rank, ranks, folder):
    state, _ = state_of(rank, ranks, False)
    save(state if rank else dict(reversed(state.items())), folder)


def loaded(rank, ranks, folder):
    state, graph = state_of(rank, ranks, True)
    load(state, folder)
    for dtype in DTYPES:
        rows = state["fields"][str(dtype)]
        assert torch.equal(rows.tensor, whole(dtype, rows.ids.long()))
    assert torch.equal(state["graph"].tensor, 10 * graph.x)


@pytest.mark.parametrize(
    ("before", "after"),
    [(3, 1), *(pytest.param(before, 3, marks=pytest.mark.slow) for before in (1, 5))],
)
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    worlds.run(before, saved, before, tmp_path)
    worlds.run(after, loaded, after, tmp_path)
    found = read(tmp_path)["fields"]
    for dtype in DTYPES:
        assert torch.equal(found[str(dtype)], whole(dtype))


def test_in_one_process_without_ranks(tmp_path):
    ids = torch.tensor([2, 0, 1])
    save({"u": RowsById(ids * 1.0, ids, 3)}, tmp_path)
    assert read(tmp_path)["u"].tolist() == [0, 1, 2]
    other = RowsById(torch.zeros(4), torch.tensor([1, 1, 2, 0]), 3)  # a row may be wanted twice
    load({"u": other}, tmp_path)
    assert other.tensor.tolist() == [1, 1, 2, 0]


def rows(values, ids, total=3):
    return {"u": RowsById(torch.tensor(values), torch.tensor(ids), total)}


NONE = {"u": RowsById(torch.zeros(0), torch.zeros(0).long(), 3)}
REFUSED = [  # state of rank 0, state of the others, error, word of the message
    (rows([1.0, 2.0, 3.0], [0, 1, 1]), NONE, ArgumentError, "row 1 of 3 is given 2"),
    (rows([1.0, 2.0], [0, 1]), NONE, ArgumentError, "row 2 of 3 is given 0 times"),
    (rows([1.0], [3]), NONE, ArgumentError, "ids"),
    (rows([1.0], [0, 1]), NONE, ArgumentError, "ids"),
    (rows([1.0], [0.0]), NONE, ArgumentError, "ids"),
    (rows([1.0], [0], -1), NONE, ArgumentError, "total"),
    (rows(1.0, [0]), NONE, ArgumentError, "tensor of RowsById"),
    (NONE, {"u": 5}, DisagreementError, "RowsById"),
    (NONE, rows([1.0], [0], 4), DisagreementError, "RowsById"),
]


@on_ranks(3)
def test_rows_that_do_not_fit(rank, tmp_path):
    for first, others, error, word in REFUSED:
        with pytest.raises(error, match=word):
            save(others if rank else first, tmp_path)
        assert not any(tmp_path.iterdir()), word
    save({"u": torch.zeros(3), "v": torch.zeros(3)}, tmp_path)
    state = {"u": torch.zeros(3) if rank else RowsById(torch.zeros(3), torch.arange(3), 3)}
    with pytest.raises(DisagreementError, match="RowsById"):
        load({**state, "v": torch.zeros(3)}, tmp_path)
