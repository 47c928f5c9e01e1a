"""``NeighborLoader``: mini-batches of nodes and their sampled neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from varcomm.errors import ArgumentError
from varcomm.graph.draws import distinct, hashed
from varcomm.graph.loader.loader import Loader, Seeds
from varcomm.graph.loader.messages import Messages
from varcomm.graph.node_shard import as_tensor, described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph


class NeighborLoader(Loader):
    """Mini-batches of nodes and their sampled neighbours, from all ranks.

    Each rank iterates over batches of its own seeds. A batch is an ordinary PyG object with the
    attributes that PyG's ``NeighborLoader`` returns, and a model runs on it as in one process.

    The owner of a node picks among its in-edges. The picks depend on the seed of the loader, the
    epoch, the step, and the ids of the seeds and nodes: equal batches have equal samples on any
    number of ranks. A rank with fewer seeds than others ends with empty batches.

    Communication: per batch, on a group of the loader's own, one comparison, 4 exchanges per hop
    and 3 for the attributes. A node of another rank whose in-edges are sampled costs 4 bytes and 4
    per type of edges, each of its picked edges 8 bytes and its attributes, and each node of another
    rank in the batch 8 bytes and its attributes. Ids have 4 bytes, or 8 from 2^31 on. The
    constructor is collective.

    In one process: ``torch_geometric.loader.NeighborLoader``.

    Parameters
    ----------
    graph : PartitionedGraph
        The graph to sample from.
    num_neighbors : list of int, or dict of such lists
        In-edges that are picked for each node, by hop; -1 picks all. A dict has a list for each
        type of edges.
    batch_size : int
        Seeds per batch on each rank.
    input_nodes : torch.Tensor, str or tuple, optional
        The seeds of this rank: a mask of its owned nodes, bool of shape (n,), or ids in the full
        graph, which other ranks may own. By default, all owned nodes. In a graph with several
        types, the type of the seeds, or a tuple of the type and the seeds.
    replace : bool
        Whether an edge can be picked several times.
    subgraph_type : {"directional", "induced"}
        The edges of a batch: those that were picked, or all edges between its nodes.
    shuffle : bool
        Whether each epoch has the seeds in another order.
    seed : int
        Seed of the orders and of the picks.
    prefetch : int
        Batches that a thread samples ahead.
    **options
        ``weight_attr``: an attribute of edges, (E,), to which the probability of a pick is
        proportional. ``drop_last=True``: leave out incomplete batches; every rank has as many as
        the rank with the fewest seeds. ``cache``: how many rows of other ranks' nodes this rank
        keeps, of each type; those of the halo, then nodes with many edges. ``transform``: a
        function that is applied to each batch.

    Raises
    ------
    ArgumentError
        On every rank, if an argument of one rank is invalid, or is one of PyG's loader that this
        loader does not have, such as ``time_attr``.
    DisagreementError
        On every rank, if arguments differ between ranks; during the iteration, if ranks leave the
        loop at different batches.

    See Also
    --------
    LinkNeighborLoader, distribute

    Notes
    -----
    The attributes are those of the graph when the loader is made, on the CPU; batches are on the
    device of the graph. ``len(loader)`` is the number of batches on every rank. All ranks iterate
    together: to leave a loop early, leave it on all ranks at the same batch. ``input_id`` has the
    positions of the seeds of a batch among the owned nodes, or in a tensor of ids.

    Without replacement, by Floyd's algorithm (Bentley and Floyd, CACM 30, 1987); with weights, by
    Efraimidis and Spirakis (Inf. Process. Lett. 97, 2006).

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     edge_index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
    ...     ring = Data(x=torch.arange(4.0) * 10, edge_index=edge_index)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     loader = varcomm.graph.NeighborLoader(graph, [-1, -1], batch_size=1, shuffle=False)
    ...     return [(batch.n_id.tolist(), batch.x.tolist()) for batch in loader]
    >>> varcomm.launch(fn, 2)[1]
    [([2, 1, 0], [20.0, 10.0, 0.0]), ([3, 2, 1], [30.0, 20.0, 10.0])]
    """

    name = "graph.NeighborLoader"

    def __init__(
        self,
        graph: PartitionedGraph,
        num_neighbors: Sequence[int] | dict[EdgeType, list[int]],
        batch_size: int = 1024,
        input_nodes: Any = None,
        replace: bool = False,
        subgraph_type: str = "directional",
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 1,
        **options: Any,
    ) -> None:
        options |= {"replace": replace, "subgraph_type": subgraph_type}
        options |= {"shuffle": shuffle, "seed": seed, "prefetch": prefetch}
        read = partial(self._read, graph, input_nodes)
        super().__init__(graph, num_neighbors, batch_size, read, **options)
        shard = graph.node_shards[self._kind]
        ids = torch.from_numpy(self._ids).to(shard.ids.device)
        self._numbers = shard.directory.look_up(ids).cpu().numpy()

    def _read(self, graph: PartitionedGraph, given: Any) -> tuple[int, dict[str, str]]:
        """Store the seeds of this rank; return their number, and the words that ranks compare."""
        kind: NodeType = None
        if isinstance(given, str):
            kind, given = given, None
        elif isinstance(given, tuple) and len(given) == 2 and None not in graph.node_shards:
            kind, given = given
        if kind not in graph.node_shards:
            raise ArgumentError(
                f"input_nodes must begin with one of the types {graph.node_types}, such as "
                f"({graph.node_types[0]!r}, ids); got {kind!r}."
            )
        nodes = graph.node_shards[kind]
        owned = nodes.owned_ids.cpu()
        given = torch.ones_like(owned, dtype=torch.bool) if given is None else as_tensor(given)
        if getattr(given, "dtype", None) != torch.bool:
            ids = nodes.checked_ids(given, "input_nodes").view(-1).cpu()
            self._inputs = torch.arange(len(ids), device="cpu")
        elif given.shape == owned.shape:
            self._inputs = given.cpu().nonzero().view(-1)
            ids = owned[self._inputs]
        else:
            raise ArgumentError(
                f"a mask of input_nodes must have shape ({nodes.num_owned},), an entry for "
                f"each owned node; got {described(given)}."
            )
        self._kind, self._ids = kind, ids.numpy()
        self._keys = distinct(self._ids)
        return len(ids), {"input_nodes": str(kind)}

    def _seeds(self, messages: Messages) -> Seeds:
        chosen = self._chosen(messages)
        key = hashed(self._ids[chosen]).sum(keepdims=True)
        return Seeds({self._kind: self._numbers[chosen]}, key, torch.from_numpy(chosen))

    def _describe(self, batch: Any, seeds: Seeds) -> None:
        store: Any = batch if self._kind is None else batch[self._kind]
        store.input_id = self._inputs[seeds.more]
        store.batch_size = len(store.input_id)
