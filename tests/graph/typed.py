"""Small graphs with several types of nodes and edges, and ways to split them."""

import torch
from torch_geometric.data import HeteroData


def typed():
    """Types without edges and without nodes, loops, two types between the same nodes, one way only.

    The same at every call.
    """
    generator = torch.Generator().manual_seed(5)
    data = HeteroData()
    data["author"].x = torch.randn(9, 4, dtype=torch.float64, generator=generator)
    data["author"].age = torch.randint(90, (9,), generator=generator)
    data["paper"].x = torch.randn(13, 2, dtype=torch.float64, generator=generator)
    data["paper"].mask = torch.rand(13, generator=generator) < 0.5
    data["venue"].num_nodes = 5
    data["editor"].x = torch.empty(0, 3)
    data["reader"].x = torch.randn(4, 1, generator=generator)
    for edge_type, count in {
        ("author", "writes", "paper"): 30,
        ("author", "likes", "paper"): 11,
        ("paper", "cites", "paper"): 25,
        ("venue", "prints", "paper"): 6,
        ("paper", "in", "venue"): 0,
        ("editor", "reads", "paper"): 0,
    }.items():
        source, _, target = edge_type
        ends = [
            torch.randint(max(1, data[end].num_nodes), (count,), generator=generator)
            for end in (source, target)
        ]
        data[edge_type].edge_index = torch.stack(ends)
        data[edge_type].weight = torch.randn(count, 2, generator=generator)
    data["paper", "cites", "paper"].edge_index[1, :3] = data["paper", "cites", "paper"].edge_index[
        0, :3
    ]
    data.year, data.scale = 1998, torch.tensor([[0.5, 2.0]])
    return data


def drawn(nodes, edges):
    """Types of nodes by their number and channels, and of edges by their number, at random.

    The last node of each type has no edges.
    """
    generator, data = torch.Generator().manual_seed(4), HeteroData()
    for kind, shape in nodes.items():
        data[kind].x = torch.randn(shape, generator=generator).double()
    for kind, count in edges.items():
        ends = [
            torch.randint(nodes[end][0] - 1, (count,), generator=generator) for end in kind[::2]
        ]
        data[kind].edge_index, weight = torch.stack(ends), torch.rand(count, generator=generator)
        data[kind].edge_weight = weight.double()
        data[kind].edge_attr = data[kind].edge_weight[:, None] ** torch.arange(2)
    return data


def owners(data, way, ranks):
    """The rank of each node, by type: by chance, with an idle rank, or each type on one rank."""
    generator = torch.Generator().manual_seed(ranks)
    found = {}
    for place, node_type in enumerate(data.node_types):
        nodes = data[node_type].num_nodes
        chance = torch.randint(ranks, (nodes,), generator=generator)
        found[node_type] = {
            "by chance": chance,
            "a rank owns nothing": torch.where(chance == ranks // 2, ranks - 1, chance),
            "each type on one": torch.full((nodes,), place % ranks),
        }[way]
    return found


WAYS = ("by chance", "a rank owns nothing", "each type on one")
