"""Which rank owns which node: METIS, coordinate bisection, blocks, or chance."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data

from varcomm.errors import ArgumentError, MissingPackageError
from varcomm.layout import exact_int

__all__ = ["METHODS", "assign", "method_used"]

METHODS = ("metis", "rcb", "block", "random")


def assign(data: Data, parts: int, method: str | None = None) -> torch.Tensor:
    """Decide which of `parts` ranks owns each node.

    Parameters
    ----------
    data : torch_geometric.data.Data
        The whole graph: ``edge_index`` of shape (2, E), and ``pos`` of shape (N, D) for ``"rcb"``.
    parts : int
        How many ranks.
    method : {"metis", "rcb", "block", "random"}, optional
        - ``"metis"``: few edges between ranks, and parts that differ by a few percent [1]_. Needs
          pymetis. Blocks, where there are not more nodes than ranks.
        - ``"rcb"``: recursive coordinate bisection, always across the widest extent [2]_; parts
          differ by one node.
        - ``"block"``: nodes in the order given; parts differ by one node.
        - ``"random"``: each node by chance, always the same; the worst case for communication.

        None takes the first of METIS, bisection and blocks for which there is what it needs.

    Returns
    -------
    torch.Tensor
        The rank of each node, int64 of shape (N,), on the CPU. The same for the same arguments.

    Raises
    ------
    ArgumentError
        If `method` is unknown, `parts` is no positive integer, or positions are missing.
    MissingPackageError
        If `method` is ``"metis"`` and pymetis is not installed.

    References
    ----------
    .. [1] G. Karypis and V. Kumar, "A fast and high quality multilevel scheme for partitioning
       irregular graphs", SIAM Journal on Scientific Computing 20 (1998), 359-392.
    .. [2] M. J. Berger and S. H. Bokhari, "A partitioning strategy for nonuniform problems on
       multiprocessors", IEEE Transactions on Computers C-36 (1987), 570-580.

    Examples
    --------
    >>> import torch
    >>> from torch_geometric.data import Data
    >>> ring = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    >>> assign(ring, 2, "block")
    tensor([0, 0, 1, 1])
    """
    if method is not None and method not in METHODS:
        raise ArgumentError(f"method must be one of {', '.join(METHODS)}, or None; got {method!r}.")
    if exact_int(parts) is None or parts < 1:
        raise ArgumentError(f"parts must be a positive integer; got {parts!r}.")
    nodes = int(data.num_nodes or 0)
    method = method_used(data, parts, method)
    if method == "metis":
        owner = _metis(data, nodes, parts)
    elif method == "rcb":
        if data.pos is None:
            raise ArgumentError('method="rcb" needs the positions of the nodes in data.pos.')
        if data.pos.dim() not in (1, 2) or len(data.pos) != nodes:
            raise ArgumentError(
                f'method="rcb" needs data.pos of shape ({nodes}, D), a row for each node; got '
                f"{tuple(data.pos.shape)}."
            )
        pos = data.pos.detach().cpu().double().numpy()
        owner = _bisection(pos[:, None] if pos.ndim == 1 else pos, parts)
    elif method == "random":
        owner = np.random.default_rng(0).integers(parts, size=nodes)
    else:
        owner = _blocks(nodes, parts)
    return torch.from_numpy(np.ascontiguousarray(owner, dtype=np.int64))


def method_used(data: Data, parts: int, method: str | None) -> str:
    """Return how nodes will be assigned: the first method for which there is what it needs.

    METIS cuts nothing into one part, and refuses more parts than nodes: then it is blocks.
    """
    if method is None:
        if importlib.util.find_spec("pymetis") is not None:
            method = "metis"
        else:
            method = "block" if data.pos is None else "rcb"
    return "block" if method == "metis" and not 1 < parts < (data.num_nodes or 0) else method


def _blocks(nodes: int, parts: int) -> np.ndarray[Any, Any]:
    base, more = divmod(nodes, parts)
    return np.repeat(np.arange(parts), [base + (part < more) for part in range(parts)])


def _bisection(pos: np.ndarray[Any, Any], parts: int) -> np.ndarray[Any, Any]:
    owner = np.zeros(len(pos), dtype=np.int64)
    todo = [(np.arange(len(pos)), 0, parts)]
    while todo:
        nodes, first, count = todo.pop()
        if count == 1 or len(nodes) == 0:
            owner[nodes] = first
            continue
        axis = int(np.ptp(pos[nodes], axis=0).argmax())
        ordered = nodes[np.argsort(pos[nodes, axis], kind="stable")]
        # Blocks decide how many nodes a side gets, so that parts differ by one node in the end.
        half = count // 2
        cut = int((_blocks(len(nodes), count) < half).sum())
        todo += [(ordered[:cut], first, half), (ordered[cut:], first + half, count - half)]
    return owner


def _metis(data: Data, nodes: int, parts: int) -> np.ndarray[Any, Any]:
    try:
        import pymetis
    except ImportError as error:
        raise MissingPackageError(
            'method="metis" needs pymetis: pip install "varcomm[partition]". '
            'Or choose method="rcb" (with data.pos) or "block".'
        ) from error
    # METIS wants each edge in both directions, once, and no loops.
    source, target = data.edge_index.cpu().numpy()
    pairs = np.concatenate([source * nodes + target, target * nodes + source])
    pairs = np.unique(pairs[np.concatenate([source, target]) != np.concatenate([target, source])])
    starts = np.searchsorted(pairs, np.arange(nodes + 1) * nodes)
    adjacency = pymetis.CSRAdjacency(starts, pairs % nodes)
    _, owner = pymetis.part_graph(parts, adjacency=adjacency)
    return np.asarray(owner)
