"""Whether two graphs are the same part of the same whole, in all that they tell of themselves."""

import torch


def differences(graph, other):
    """Return the names of what two partitioned graphs of this rank differ in."""
    pairs = {
        "node types": (graph.node_types, other.node_types),
        "edge types": (graph.edge_types, other.edge_types),
        "attributes of the graph": (dict(graph.attributes), dict(other.attributes)),
    }
    # in the same order on all ranks, since exchanges are compared too
    for kind in ("node", "edge"):
        shards, others = getattr(graph, f"{kind}_shards"), getattr(other, f"{kind}_shards")
        for key in shards:
            if key in others:
                pairs |= _pairs(f"{kind}s {key}", shards[key], others[key])
    return [name for name, (one, two) in pairs.items() if not same(one, two)]


def _pairs(name, shard, other):
    described, expected = _described(shard), _described(other)
    return {f"{name}: {key}": (described[key], expected[key]) for key in expected}


def _described(shard):
    told = {key: getattr(shard, key) for key in ("sizes", "num_owned", "owned_ids")}
    told["attributes"] = dict(shard.attributes)
    if hasattr(shard, "plan"):
        told |= {
            key: getattr(shard, key)
            for key in ("edge_index", "halo_ids", "num_targets", "num_sources", "hops")
        }
        told |= {
            f"plan.{key}": getattr(shard.plan, key)
            for key in ("send_index", "send_counts", "recv_counts", "num_rows")
        }
        # what an exchange gives, not only what it is made of
        told["exchanged"] = shard.with_halo(torch.arange(shard.num_sources) * 3 + 1)
    return told


def same(one, two):
    """Compare tensors bit for bit, with dtype and shape, and what holds them."""
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        kinds = [(x.dtype, x.shape, x.requires_grad) for x in (one, two)]
        return kinds[0] == kinds[1] and torch.equal(one.resolve_conj(), two.resolve_conj())
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    return type(one) is type(two) and one == two
