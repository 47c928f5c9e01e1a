"""Fields of partitioned graphs: saved as the whole, loaded by whatever rows a rank has then."""

import pytest
import torch
from torch_geometric.data import Data

from varcomm import ArgumentError, DisagreementError
from varcomm.checkpoint import Rows, load, read, save
from varcomm.graph import partition

PAIRS = [
    (3, 1),
    (1, 3),
    pytest.param(5, 3, marks=pytest.mark.slow),
]
N = 17
DTYPES = (
    torch.float64,
    torch.bfloat16,
    torch.int32,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
)


def whole(dtype, ids=slice(None)):
    return torch.arange(N * 6).view(N, 3, 2).remainder(7)[ids].to(dtype)


def ids_of(rank, ranks, seed):
    """Rows in no order, of which the last rank but one has none."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(seed))
    owner = torch.arange(N) % max(1, ranks - 1)
    owner[owner == ranks - 2] = ranks - 1
    return order[owner == rank]


def saved(rank, ranks, folder):
    ids = ids_of(rank, ranks, 1)
    state = {str(dtype): Rows(whole(dtype, ids), ids, N) for dtype in DTYPES}
    if rank:
        state = dict(reversed(state.items()))
    save({"fields": state, "none": Rows(torch.zeros(0, 3), torch.zeros(0).long(), 0)}, folder)


def loaded(rank, ranks, folder):
    ids = ids_of(rank, ranks, 2).int()
    state = {str(dtype): Rows(torch.zeros(len(ids), 3, 2).to(dtype), ids, N) for dtype in DTYPES}
    load({"none": Rows(torch.zeros(0, 3), torch.zeros(0).long(), 0), "fields": state}, folder)
    return all(torch.equal(state[str(d)].tensor, whole(d, ids.long())) for d in DTYPES)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_saved_on_some_ranks_and_loaded_on_others(worlds, tmp_path, before, after):
    worlds.run(before, saved, before, tmp_path)
    assert worlds.run(after, loaded, after, tmp_path) == [True] * after
    found = read(tmp_path)["fields"]
    for dtype in DTYPES:
        assert torch.equal(found[str(dtype)], whole(dtype))


def test_in_one_process_without_ranks(tmp_path):
    ids = torch.tensor([2, 0, 1])
    save({"u": Rows(ids * 1.0, ids, 3)}, tmp_path)
    assert read(tmp_path)["u"].tolist() == [0, 1, 2]
    other = Rows(torch.zeros(4), torch.tensor([1, 1, 2, 0]), 3)  # a row may be wanted twice
    load({"u": other}, tmp_path)
    assert other.tensor.tolist() == [1, 1, 2, 0]


def field_of(ranks):
    """A field that needs a gradient, of a graph that is partitioned anew on other ranks."""
    edges = torch.stack([torch.arange(N), (torch.arange(N) + 1) % N])
    method = torch.arange(N) * 5 % ranks
    graph = partition(Data(edge_index=edges, x=torch.arange(N * 1.0)), method=method)
    field = torch.nn.Parameter(10 * graph.x)
    return graph, field, {"field": Rows(field, graph.owned_ids, N)}


def save_field(rank, ranks, folder):
    save(field_of(ranks)[2], folder)


def load_field(rank, ranks, folder):
    graph, field, state = field_of(ranks)
    with torch.no_grad():
        field.zero_()
    load(state, folder)
    return torch.equal(field, 10 * graph.x)


def test_a_graph_is_partitioned_anew(worlds, tmp_path):
    worlds.run(3, save_field, 3, tmp_path)
    assert worlds.run(1, load_field, 1, tmp_path) == [True]


def rows(values, ids, total=3):
    return {"u": Rows(torch.tensor(values), torch.tensor(ids), total)}


NONE = {"u": Rows(torch.zeros(0), torch.zeros(0).long(), 3)}

# state of rank 0, state of the others, error, word of the message
REFUSED = {
    "twice": (rows([1.0, 2.0, 3.0], [0, 1, 1]), NONE, ArgumentError, "row 1 of 3 is given 2"),
    "never": (rows([1.0, 2.0], [0, 1]), NONE, ArgumentError, "row 2 of 3 is given 0 times"),
    "range": (rows([1.0], [3]), NONE, ArgumentError, "ids"),
    "count": (rows([1.0], [0, 1]), NONE, ArgumentError, "ids"),
    "dtype": (rows([1.0], [0.0]), NONE, ArgumentError, "ids"),
    "total": (rows([1.0], [0], -1), NONE, ArgumentError, "total"),
    "scalar": (rows(1.0, [0]), NONE, ArgumentError, "tensor of Rows"),
    "keys": (NONE, {"u": 5}, DisagreementError, "Rows"),
    "totals": (NONE, rows([1.0], [0], 4), DisagreementError, "Rows"),
}


def refused(rank, folder):
    for name, (first, others, error, word) in REFUSED.items():
        with pytest.raises(error, match=word):
            save(others if rank else first, folder)
        assert not any(folder.iterdir()), name
    save({"u": torch.zeros(3), "v": torch.zeros(3)}, folder)
    state = {"u": torch.zeros(3) if rank else Rows(torch.zeros(3), torch.arange(3), 3)}
    with pytest.raises(DisagreementError, match="Rows"):
        load({**state, "v": torch.zeros(3)}, folder)
    return True


def test_rows_that_do_not_fit(worlds, tmp_path):
    assert worlds.run(3, refused, tmp_path) == [True] * 3
