"""Reference partitions: sort all nodes, then walk along them."""

import torch
from torch_geometric.data import Data

from varcomm import ShardSizes
from varcomm.graph import assign


def shares(total, parts):
    """Return the start of each share."""
    return ShardSizes.balanced(total, parts).offsets


def behind(weights, cut):
    """Return whether the middle of each node, in order, is behind a cut."""
    start, found = 0, []
    for weight in weights:
        found.append(start + (weight - 1) // 2 >= cut)
        start += weight
    return found


def in_order(order, weights, parts):
    owner = torch.zeros(len(order), dtype=torch.int64)
    ordered = [weights[i] for i in order]
    for cut in shares(sum(weights), parts)[1:]:
        for i, is_behind in zip(order, behind(ordered, cut), strict=True):
            owner[i] += is_behind
    return owner


def hilbert(pos, weights, parts):
    """The order along the curve is that of as many parts as nodes."""
    if len(pos) == 0:
        return torch.zeros(0, dtype=torch.int64)
    order = assign(at(pos), len(pos), "hilbert").argsort().tolist()
    return in_order(order, weights, parts)


def rcb(pos, weights, parts):
    owner = torch.zeros(len(pos), dtype=torch.int64)
    boxes = [(list(range(len(pos))), 0, parts)]
    for nodes, first, count in boxes:
        if count == 1 or not nodes:
            owner[nodes] = first
            continue
        columns = list(zip(*pos[nodes].double().tolist(), strict=True))
        extents = [max(column) / 2 - min(column) / 2 for column in columns]
        along = columns[extents.index(max(extents))]
        order = sorted(range(len(nodes)), key=along.__getitem__)
        ordered = [nodes[i] for i in order]
        half = count // 2
        cut = shares(sum(weights[i] for i in nodes), count)[half]
        right = behind([weights[i] for i in ordered], cut)
        split = right.index(True) if any(right) else len(right)
        boxes += [
            (sorted(ordered[:split]), first, half),
            (sorted(ordered[split:]), first + half, count - half),
        ]
    return owner


def block(pos, weights, parts):
    return in_order(range(len(pos)), weights, parts)


NAIVE = {"hilbert": hilbert, "rcb": rcb, "block": block}


def awkward_positions(seed, nodes, dims):
    """Positions with duplicates, zeros of both signs, and orders of magnitude between them."""
    generator = torch.Generator().manual_seed(seed)
    pos = torch.randn(nodes, dims, generator=generator, dtype=torch.float64)
    kind = seed % 4
    if kind == 1:
        pos = pos.round()  # duplicates, and zeros of both signs
    elif kind == 2:
        pos = pos * 10.0 ** torch.randint(-300, 300, (nodes, 1), generator=generator).double()
    elif kind == 3:
        pos = pos.float()
    return pos


def some_weights(seed, nodes):
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randint(0, 4, (nodes,), generator=generator)
    if nodes:
        weights[seed % nodes] += 1 + 20 * (seed % 3 == 0)
    return weights


def at(pos):
    return Data(pos=pos, num_nodes=len(pos))
