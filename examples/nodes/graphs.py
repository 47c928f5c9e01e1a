"""Two large graphs, a task on their nodes, and baselines without a network.

Nodes have no features and no coordinates. The input of a node is its distance, in edges, from
random landmarks. The label is its part in a partition by METIS, known for a few nodes.
"""

import lzma
from pathlib import Path

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import dijkstra
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data

import varcomm as vc

FOLDER = Path(__file__).parent / "data"
NAMES = ("copter2", "mdual")
PARTS = 8
LANDMARKS = 16


def neighbours(path: Path) -> np.ndarray:
    """Return the edges (2, E), sources first, of a file of ``make_data.py``, sorted by target."""
    raw = lzma.decompress(path.read_bytes())
    nodes, edges = np.frombuffer(raw, "<u4", 2).astype(int)
    count = np.frombuffer(raw, np.uint8, nodes, 8)
    planes = np.frombuffer(raw, np.uint8, 4 * edges, 8 + nodes).reshape(4, edges)
    gap = np.ascontiguousarray(planes.T).view("<u4").ravel().astype(np.int64)
    # cumulative gaps of each node: one cumulative sum over all edges, minus its value before the
    # node
    node = np.repeat(np.arange(nodes), count)
    total = np.cumsum(gap)
    before = np.concatenate([[0], total])[np.cumsum(count, dtype=np.int64) - count]
    neighbour = node + total - before[node]
    both = np.stack([np.append(node, neighbour), np.append(neighbour, node)])
    return both[:, np.lexsort(both)]


def adjacency(edge_index: np.ndarray) -> sparse.csr_matrix:
    """Return the matrix (N, N) with a 1 for each edge."""
    source, target = edge_index
    return sparse.coo_matrix((np.ones(len(source), np.float32), (target, source))).tocsr()


def load(name: str, labels: int = 50) -> Data:
    """Return a graph by its name, in float32.

    - ``x`` (N, 16): edges between the node and each landmark, standardised.
    - ``y`` (N,): the part of the node, one of 8.
    - ``train_mask``, ``test_mask`` (N,): the nodes with a known label, `labels` per part, and all
      other nodes.
    """
    edge_index = neighbours(FOLDER / f"{name}.xz")
    data = Data(edge_index=torch.from_numpy(edge_index), num_nodes=int(edge_index.max()) + 1)
    return with_question(data, labels)


def with_question(data: Data, labels: int) -> Data:
    """Add inputs and labels to a graph that has only edges."""
    draws = np.random.default_rng(0)
    landmarks = draws.choice(data.num_nodes, LANDMARKS, replace=False)
    hops = dijkstra(adjacency(data.edge_index.numpy()), unweighted=True, indices=landmarks).T
    data.x = torch.from_numpy((hops - hops.mean(axis=0)) / hops.std(axis=0)).float()
    data.y = vc.graph.assign(data, PARTS, "metis")
    data.train_mask = torch.zeros(data.num_nodes, dtype=torch.bool)
    for part in range(PARTS):
        data.train_mask[draws.choice((data.y == part).nonzero()[:, 0], labels, replace=False)] = (
            True
        )
    data.test_mask = ~data.train_mask
    return data


def accuracy(data: Data, guess: torch.Tensor) -> float:
    """Return the share of test nodes whose guess (N,) is right."""
    return float((guess == data.y)[data.test_mask].double().mean())


def baselines(data: Data) -> dict[str, torch.Tensor]:
    """Return guesses (N,) without a network, by name."""
    known = data.train_mask.nonzero()[:, 0].numpy()
    *_, nearest = dijkstra(
        adjacency(data.edge_index.numpy()),
        unweighted=True,
        indices=known,
        min_only=True,
        return_predecessors=True,
    )
    return {
        "largest part": torch.full_like(data.y, int(data.y.bincount().argmax())),
        "part of the nearest known node": data.y[nearest],
        "logistic regression on the distances": logistic_regression(data),
    }


def logistic_regression(data: Data) -> torch.Tensor:
    x = torch.cat([data.x, torch.ones_like(data.x[:, :1])], dim=1).double()
    weights = torch.zeros(x.shape[1], PARTS, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=300, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        fit = cross_entropy(x[data.train_mask] @ weights, data.y[data.train_mask])
        value = fit + 1e-3 * weights.square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    return (x @ weights).argmax(dim=1).detach()


def plane(x: torch.Tensor) -> torch.Tensor:
    """Return two coordinates (N, 2) for drawings: the first principal components of features."""
    centred = (x - x.mean(dim=0)).double()
    _, directions = torch.linalg.eigh(centred.T @ centred)  # eigenvalues ascend
    return centred @ directions[:, [-1, -2]]
