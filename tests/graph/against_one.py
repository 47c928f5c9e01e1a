"""Calls on ranks beside the same in one process: exact, refused on all ranks, or what is wrong."""

import copy
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch_geometric.data import HeteroData

import varcomm
from tests.graph.graphs import split_by
from tests.graph.layers import example
from varcomm import ArgumentError
from varcomm.graph import PartitionedGraph, distribute, partition

CLOSE = {"rtol": 1e-12, "atol": 1e-12}
IDLE = "a rank owns nothing"


def data_of():
    """``example()`` with a graph, a class and a kind of each node."""
    data, node = example(), torch.arange(24)
    data.batch, data.label, data.atom = node * 5 % 3, node % 4, node % 5 + 1
    data.good = data.x[:, 0] > 0
    return data


def two_types():
    """Nodes of two types, of which one has edges into the other."""
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    for kind, nodes, channels in (("a", 14, 4), ("b", 9, 3)):
        for name, width in {"x": channels, "pos": 3, "normal": 3}.items():
            data[kind][name] = torch.randn(nodes, width, generator=generator).double()
        data[kind].batch = torch.arange(nodes) * 5 % 3
    ends = [torch.randint(nodes, (40,), generator=generator) for nodes in (14, 9)]
    weight = torch.rand(40, generator=generator).double()
    data["a", "to", "b"].edge_index = torch.stack(ends)
    data["a", "to", "b"].weight, data["a", "to", "b"].attr = (
        weight,
        weight[:, None] ** torch.arange(2),
    )
    data["a", "to", "b"].kind = torch.arange(40) % 3
    return data


def graph_of(data, method=IDLE, **settings):
    """Partition by this method, by default so that a rank owns nothing."""
    ranks = dist.get_world_size()
    if isinstance(data, HeteroData) and method == IDLE:
        nodes = {kind: data[kind].num_nodes for kind in data.node_types}
        method = {kind: split_by(IDLE, count, ranks) for kind, count in nodes.items()}
    elif method == IDLE:
        method = split_by(IDLE, data.num_nodes, ranks)
    return partition(data, method=method, **settings)


def values_of(graph):
    """Return attributes by their names; those of a type of nodes end in the name of the type.

    If there are several types of edges, theirs end in the three names of the type.
    """
    if list(getattr(graph, "node_types", [None])) == [None]:
        return dict(getattr(graph, "data", graph))
    found = {"node_types": graph.node_types, "edge_types": graph.edge_types}
    data = getattr(graph, "data", graph)
    for kind in graph.node_types:
        found |= {f"{name}_{kind}": value for name, value in data[kind].items()}
    for kind in graph.edge_types:
        end = f"_{'_'.join(kind)}" if len(graph.edge_types) > 1 else ""
        found |= {f"{name}{end}": value for name, value in data[kind].items()}
    return found


def places_of(data, graph):
    """Return the ids of this rank's rows, by the number of all rows."""
    if not isinstance(data, HeteroData):
        return {data.num_nodes: graph.owned_ids, data.num_edges: graph.edges.owned_ids}
    nodes = {data[kind].num_nodes: graph[kind].owned_ids for kind in data.node_types}
    return nodes | {data[kind].num_edges: graph[kind].owned_ids for kind in data.edge_types}


def outcome(model, call, graph, by, rows_of, count, second):
    """Return results, and gradients of a loss of them by name; `count` makes a loss count once.

    With `second`, also the gradients of the squared length of the gradients of `by`.
    """
    on_ranks = graph if isinstance(graph, PartitionedGraph) else None
    given = SimpleNamespace(**values_of(graph), graph=on_ranks)
    leaves = {name: getattr(given, name).clone().requires_grad_() for name in by}
    vars(given).update(leaves)
    torch.manual_seed(1)
    out = call(model, given)
    outs = [one for one in (out if isinstance(out, tuple) else (out,)) if one is not None]
    loss, results = 0.0, []
    for one in outs:
        results.append(one.detach().clone())
        ids = rows_of(one)
        of_all = ids is None
        ids = torch.arange(one.numel()).view(one.shape) if of_all else ids
        weight = (ids.double() * 3 + 1).sin().view(-1, *[1] * (one.dim() - 1) * (not of_all))
        part = (one.double().sin() * weight.view(one.shape if of_all else weight.shape)).sum()
        loss = loss + (count(part) if of_all else part)
    leaves = {f"input {name}": one for name, one in leaves.items()}
    inputs = {*leaves}
    if model is not None:
        leaves |= dict(model.named_parameters())
    leaves = {name: one for name, one in leaves.items() if one.requires_grad}
    if not loss.requires_grad or not leaves:
        return results, {}
    if not second:
        loss.backward()  # checkpoints of torch may know nothing else
        grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves.values()]
        return results, dict(zip(leaves, grads, strict=True))
    every = {"allow_unused": True, "materialize_grads": True}
    first = torch.autograd.grad(loss, [*leaves.values()], create_graph=True, **every)
    grads = dict(zip(leaves, first, strict=True))
    # of the rows' gradients alone: those of parameters are parts of a sum still
    length = sum((grads[name] ** 2).sum() for name in inputs)
    if inputs and length.requires_grad:
        more = torch.autograd.grad(length, [*leaves.values()], **every)
        grads |= {f"second {name}": one for name, one in zip(leaves, more, strict=True)}
    return results, grads


class UnfitError(Exception):
    """A call fails in one process."""


def compare(make, call, data, graph, by=("x",), put=distribute, second=False, close=CLOSE):
    """Return what a call on this rank has other than one process; `put` puts a model on ranks."""
    torch.manual_seed(0)
    alone = make().double() if make else None
    together = copy.deepcopy(alone)
    sizes, places = [], places_of(data, graph)

    def whole_rows(out):
        sizes.append(len(out) if out.dim() and len(out) in places else None)
        return sizes[-1] and torch.arange(sizes[-1])

    try:
        expected = outcome(alone, call, data, by, whole_rows, lambda loss: loss, second)
    except Exception as error:
        raise UnfitError from error
    of = iter(sizes)
    if put and together is not None:
        together = put(together, graph)

    def own_rows(out):
        return places.get(next(of))

    # ranks have losses of their own, whose sum is that of one process
    ranks = dist.get_world_size()
    share = 2 * (dist.get_rank() + 1) / (ranks * (ranks + 1))
    got = outcome(together, call, graph, by, own_rows, lambda loss: loss * share, second)
    pairs = []
    for number, (one, two, size) in enumerate(zip(got[0], expected[0], sizes, strict=True)):
        pairs.append((f"output {number}", one, two if size is None else two[places[size]]))
    for name, theirs in expected[1].items():
        mine = got[1][name]
        if name.removeprefix("second ").startswith("input "):
            pairs.append((f"gradient of {name}", mine, theirs[places[len(theirs)]]))
        else:
            pairs.append((f"gradient of {name}", varcomm.all_reduce(mine), theirs))
    on_all = [one for one, size in zip(got[0], sizes, strict=True) if size is None]
    found = []
    if alone is not None:
        pairs += [(k, together.get_buffer(k), buffer) for k, buffer in alone.named_buffers()]
        on_all += [together.get_buffer(name).detach() for name, _ in alone.named_buffers()]
        found += ["state_dict()"] * ([*together.state_dict()] != [*alone.state_dict()])
    copies = [None] * ranks
    dist.all_gather_object(copies, on_all)
    exact = {"rtol": 0, "atol": 0, "equal_nan": True}
    for one, two in zip(on_all, copies[0], strict=True):
        found += [] if torch.allclose(one, two, **exact) else ["a value that all ranks have"]
    found += [
        name for name, mine, theirs in pairs
        if mine.shape != theirs.shape or not torch.allclose(mine, theirs, equal_nan=True, **close)
    ]  # fmt: skip
    return [f"{name} differs" for name in found]


def verdict(*args, **settings):
    """Return "exact", "refused" or what is wrong on any rank; the same on all ranks."""
    try:
        found = ", ".join(compare(*args, **settings)) or "exact"
    except UnfitError as error:
        found = f"fails in one process: {error.__cause__}"
    except ArgumentError:
        found = "refused"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    ranks = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    if "refused" in ranks and not any(one == "exact" or "differs" in one for one in ranks):
        return "refused"  # PyG may fail on a rank without rows before it comes to a vector
    return ranks[0] if len(set(ranks)) == 1 else str(ranks)


def verdicts(rank, cases, names, make_data, method, second, overlap):
    """Return the verdict of each of these cases: (make, call, what is differentiated by)."""
    put = partial(distribute, overlap=overlap)
    data = make_data()
    graph = graph_of(data, method)
    return {
        name: verdict(make, call, data, graph, by=by or ("x",), put=put, second=second)
        for name, (make, call, *by) in cases().items()
        if name in names
    }


def assert_verdicts(
    worlds,
    cases,
    expected,
    make_data=data_of,
    ranks=3,
    method=IDLE,
    second=False,
    overlap=False,
):
    """Compare the verdicts of ranks with those that a table has."""
    how = method, second, overlap
    found = worlds.run(ranks, verdicts, cases, list(expected), make_data, *how)[0]
    raised = {n for n, v in found.items() if "Error" in v and "'exact'" not in v}
    wrong = {
        name: found[name]
        for name, told in expected.items()
        if found[name] != told and not (told == "refused" and name in raised)
    }
    assert not wrong, wrong
