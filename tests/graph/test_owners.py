"""Owners of nodes as lists, arrays and tensors, in every call that takes the rank of each node."""

import numpy as np
import pandas
import pytest
import torch

import varcomm as vc
from tests.graph.graphs import split_by, wild
from tests.graph.parts import differences
from tests.graph.typed import WAYS, owners, typed
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.graph import assign, from_edges, partition, rebalance

NODES = 11


def read_only(owner):
    array = owner.numpy().astype(np.uint8)
    array.flags.writeable = False
    return array


# The same ranks as other libraries return them.
KINDS = {
    "list": torch.Tensor.tolist,  # pymetis
    "tuple": lambda owner: tuple(owner.numpy()),
    "list of tensors": list,
    "array of foreign bytes": lambda owner: owner.numpy().astype(">i4"),
    "array with steps": lambda owner: owner.numpy().repeat(2)[::2],
    "array that must not be written": read_only,
    "series": lambda owner: pandas.Series(owner.numpy()),
    "int8": torch.Tensor.char,
}

# What is refused: other values, and a part of the message.
WRONG = {
    "floats": (lambda owner: owner.double().tolist(), "float64"),
    "bools": (lambda owner: (owner > 0).tolist(), "bool"),
    "strings": (lambda owner: list(map(str, owner.tolist())), "list"),
    "nested": (lambda owner: [*owner.tolist()[1:], [0, 1]], "list"),
    "a hole": (lambda owner: [*owner.tolist()[1:], None], "list"),
    "one too few": (lambda owner: owner.tolist()[1:], "shape"),
    "out of range": (lambda owner: [*owner.tolist()[1:], 3], "out of range"),
}


@pytest.mark.slow
@on_ranks(3)
def test_owners_of_every_kind(rank):
    """One rank owns nothing: its list is empty, without a dtype."""
    data = wild(NODES)
    owner = split_by("a rank owns nothing", NODES, 3)
    expected, old = partition(data, method=owner), partition(data, method="random")
    sizes, same = [0, NODES, 0], [0, 1, 2][rank] == 1
    mine = owner if same else owner[:0]
    attrs = {"y": data.y if same else data.y[:0]}
    edge_index = data.edge_index if same else data.edge_index[:, :0]
    built = from_edges(edge_index, sizes, node_attrs=attrs, method=mine)
    for name, of in KINDS.items():
        wrong = differences(partition(data, method=of(owner)), expected)
        one = (data, None, of(owner), 1) if rank == 1 else (None, None, None, 1)
        wrong += differences(partition(*one), expected)
        wrong += differences(old.migrate(of(owner[old.owned_ids])), expected)
        wrong += differences(
            from_edges(edge_index, sizes, node_attrs=attrs, method=of(mine)), built
        )
        parts = vc.simulate.partition(data, 3, of(owner))
        wrong += [*({*parts.owned.tolist()} - {*torch.bincount(owner).tolist()})]
        assert not wrong, name
        weight = torch.arange(NODES)
        cut = assign(data, 3, "block", node_weight=of(weight))
        assert torch.equal(cut, assign(data, 3, "block", node_weight=weight)), name
    costs = weight[old.owned_ids]
    balanced = rebalance(old, costs)
    for name in ("list", "array with steps"):  # it converts them as the others do
        assert not differences(rebalance(old, KINDS[name](costs)), balanced), name
    kinds = typed()
    by_type = owners(kinds, WAYS[1], 3)
    lists = {key: value.tolist() for key, value in by_type.items()}
    expected = partition(kinds, method=by_type)
    assert not differences(partition(kinds, method=lists), expected)
    old = partition(kinds, method=owners(kinds, WAYS[0], 3))
    lists = {key: by_type[key][old[key].owned_ids].tolist() for key in lists}
    assert not differences(old.migrate(lists), expected)


@on_ranks(3)
def test_refused_owners(rank):
    """On one rank wrong, refused on all ranks, with the kinds that are accepted."""
    data = wild(NODES)
    owner = split_by("a rank owns nothing", NODES, 3)
    graph = partition(data, method="block")
    own = owner[graph.owned_ids]
    for name, (of, message) in WRONG.items():
        given = of(owner) if rank == 1 else owner
        with pytest.raises(ArgumentError, match=message):
            partition(data, method=given)
        with pytest.raises(ArgumentError, match="rank 1 of 3") as raised:
            graph.migrate(of(own) if rank == 1 else own)
        assert name == "out of range" or "a list, an array or a tensor" in str(raised.value)
