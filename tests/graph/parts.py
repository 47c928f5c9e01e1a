"""The content of a rank's part, as the graph has it and as found by hand, and comparisons."""

import pytest
import torch

from tests.graph.batches import plain
from tests.worlds import assert_alike


def contents(graph):
    """Everything in a part but its method: (nodes, edges or graph; type; name) -> value."""
    whole = {"hops": graph.hops, **graph.attributes}
    found = {("graph", None, name): value for name, value in whole.items()}
    for kind, shards in (("nodes", graph.node_shards), ("edges", graph.edge_shards)):
        for key, shard in shards.items():
            found |= {(kind, key, name): value for name, value in shard.attributes.items()}
            found[kind, key, "sizes"], found[kind, key, "ids"] = tuple(shard.sizes), shard.owned_ids
    for key, edges in graph.edge_shards.items():
        ids = graph.node_shards[None if key is None else key[0]].owned_ids
        counts = edges.num_sources, edges.num_halo, edges.num_targets, edges.num_owned
        local = {"index": edges.local_ids, "halo": edges.halo_ids, "counts": counts}
        local |= {"interior": edges.interior, "boundary": edges.boundary}
        # results of an exchange, in the same order on all ranks
        local |= {"with halo": edges.with_halo(ids), "only halo": edges.halo(ids)}
        for name in ("send_index", "send_counts", "recv_counts", "num_rows"):
            local[f"plan {name}"] = getattr(edges.plan, name)
        found |= {("local", key, name): value for name, value in local.items()}
    return {key: plain(value) for key, value in found.items()}


def by_hand(data, owner, rank, ranks):
    """The same, but for the plan and hops, edge by edge; `owner` is the rank of each node,
    by type if there are several.
    """
    if isinstance(owner, dict):
        nodes, edges = dict(data.node_items()), dict(data.edge_items())
    else:
        nodes, edges, owner = {None: data}, {None: data}, {None: owner}
    found = {}
    for key, store in nodes.items():
        ids = torch.nonzero(owner[key] == rank).view(-1)
        found |= rows_of("nodes", key, store, ids, torch.bincount(owner[key], minlength=ranks))
    for key, store in edges.items():
        source, target = (None, None) if key is None else (key[0], key[2])
        here = owner[target][store.edge_index[1]]
        ids = torch.nonzero(here == rank).view(-1)
        found |= rows_of("edges", key, store, ids, torch.bincount(here, minlength=ranks))
        sources, targets = found["nodes", source, "ids"], found["nodes", target, "ids"]
        u, v = store.edge_index[:, ids].tolist()
        # by owner, and then in the owner's order
        others = {node for node in u if owner[source][node] != rank}
        halo = sorted(others, key=lambda node: (int(owner[source][node]), node))
        known = [*sources.tolist(), *halo]
        place = {node: at for at, node in enumerate(known)}
        at_target = {node: at for at, node in enumerate(targets.tolist())}
        index = [[place[node] for node in u], [at_target[node] for node in v]]
        inner = [at < len(sources) for at in index[0]]
        local = {
            "index": torch.tensor(index, dtype=torch.int64).view(2, -1),
            "counts": (len(sources), len(halo), len(targets), len(ids)),
            "halo": halo,
            "with halo": known,
            "only halo": halo,
            "interior": [at for at, own in enumerate(inner) if own],
            "boundary": [at for at, own in enumerate(inner) if not own],
        }
        found |= {("local", key, name): value for name, value in local.items()}
    return {
        k: torch.tensor(v, dtype=torch.int64) if type(v) is list else v for k, v in found.items()
    }


def rows_of(kind, key, store, ids, sizes):
    found = {(kind, key, "ids"): ids, (kind, key, "sizes"): tuple(sizes.tolist())}
    for name, value in store.items():
        is_own = key is not None or getattr(store, f"is_{kind[:4]}_attr")(name)
        if is_own and isinstance(value, torch.Tensor) and name != "edge_index":
            found[kind, key, name] = value[ids]
    return found


def differences(graph, other):
    """Return the names of all that differs between two graphs of this rank."""
    one, two = contents(graph), contents(other)
    return [*(one.keys() ^ two.keys()), *different(one, two)]


def different(one, two):
    """Return the names that are in both and have other values."""
    return [name for name in one if name in two and not same(one[name], two[name])]


def same(one, two):
    """Compare tensors bit for bit, with dtype and shape, and containers of them."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        kinds = [(x.dtype, x.shape, x.requires_grad) for x in (one, two)]
        return kinds[0] == kinds[1] and torch.equal(one.resolve_conj(), two.resolve_conj())
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return type(one) is type(two) and one == two


def refusing(function, start=""):
    """Return a check that all ranks refuse a call alike; a message has that start and words."""

    def check(kind, words, *arguments, **options):
        with pytest.raises(kind) as caught:
            function(*arguments, **options)
        assert_alike(caught.value, *words)
        assert str(caught.value).startswith(start)

    return check
