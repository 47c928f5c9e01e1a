"""``LinkNeighborLoader``: mini-batches of edges, with sampled neighbours of both ends."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from torch_geometric.sampler import NegativeSampling

from varcomm.errors import ArgumentError
from varcomm.graph.build.pyg_data import ends
from varcomm.graph.draws import distinct, hashed, uniform
from varcomm.graph.loader.loader import Loader, Seeds
from varcomm.graph.loader.messages import Messages
from varcomm.graph.loader.stored_rows import fetch, numbers_of
from varcomm.graph.node_shard import as_tensor, described
from varcomm.graph.partitioned_graph import EdgeType, PartitionedGraph
from varcomm.transport.agreement import share


class LinkNeighborLoader(Loader):
    """Mini-batches of edges with sampled neighbours of their ends, from all ranks.

    As :class:`NeighborLoader`, with edges as seeds: a batch has ``edge_label_index``, positions of
    the ends among its nodes, and ``edge_label``; or ``src_index``, ``dst_pos_index`` and
    ``dst_neg_index`` for triplets.

    Communication: as in :class:`NeighborLoader`, and per batch 3 exchanges that find the owners of
    the seeds, with 8 bytes per seed.

    In one process: ``torch_geometric.loader.LinkNeighborLoader``.

    Parameters
    ----------
    graph, num_neighbors, batch_size
        As in :class:`NeighborLoader`; `batch_size` counts edges, without negative ones.
    edge_label_index : torch.Tensor or tuple, optional
        The edges of this rank, ids of nodes in the full graph, int64 of shape (2, L), which other
        ranks may own. By default, the edges into owned nodes. In a graph with several types, the
        type of the edges, or a tuple of the type and the ids.
    edge_label : torch.Tensor, optional
        A label of each edge, (L,). With binary negative sampling, the labels are one larger in a
        batch if the smallest of all ranks is 0, and 0 marks negative edges.
    neg_sampling : NegativeSampling, str, dict or tuple, optional
        ``"binary"`` adds random pairs of nodes, ``"triplet"`` random targets for each source;
        ``("binary", 2.0)`` adds two for each edge. Nodes are drawn uniformly. As in PyG, a negative
        edge can be an edge of the graph.
    **options
        As in :class:`NeighborLoader`, from `replace` on.

    Raises
    ------
    ArgumentError, DisagreementError
        As in :class:`NeighborLoader`.

    See Also
    --------
    NeighborLoader

    Examples
    --------
    >>> import torch, varcomm
    >>> from torch_geometric.data import Data
    >>> def fn(rank):
    ...     ring = Data(edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]), num_nodes=4)
    ...     graph = varcomm.graph.partition(ring, method="block")
    ...     loader = varcomm.graph.LinkNeighborLoader(graph, [1], batch_size=2, shuffle=False)
    ...     batch = next(iter(loader))
    ...     return batch.n_id[batch.edge_label_index].tolist()
    >>> varcomm.launch(fn, 2)
    [[[0, 3], [1, 0]], [[1, 2], [2, 3]]]
    """

    name = "graph.LinkNeighborLoader"

    def __init__(
        self,
        graph: PartitionedGraph,
        num_neighbors: Sequence[int] | dict[EdgeType, list[int]],
        batch_size: int = 1024,
        edge_label_index: Any = None,
        edge_label: torch.Tensor | None = None,
        neg_sampling: Any = None,
        **options: Any,
    ) -> None:
        kind: EdgeType = None
        pairs = torch.zeros(2, 0, dtype=torch.int64)
        negative: NegativeSampling | None = None

        def inputs() -> tuple[int, dict[str, str]]:
            nonlocal kind, pairs, negative
            negative = _negative(neg_sampling, edge_label)
            kind, given = _given(edge_label_index, graph)
            shard = graph.edge_shards[kind]
            source, target = (graph.node_shards[end] for end in ends(kind))
            if given is None:
                local = shard.local_ids[:, : shard.num_owned]
                both = torch.cat([source.owned_ids, shard.halo_ids])
                pairs = torch.stack([both[local[0]], target.owned_ids[local[1]]]).cpu()
            else:
                given = as_tensor(given)
                if getattr(given, "dim", int)() != 2 or len(given) != 2:
                    raise ArgumentError(
                        f"edge_label_index must have shape (2, L); got {described(given)}."
                    )
                start, end = (
                    of.checked_ids(ids, "edge_label_index").cpu()
                    for of, ids in zip((source, target), given, strict=True)
                )
                pairs = torch.stack([start, end])
            if edge_label is not None and (
                not isinstance(edge_label, torch.Tensor) or len(edge_label) != pairs.shape[1]
            ):
                raise ArgumentError(
                    f"edge_label must be a tensor with an entry for each of the {pairs.shape[1]} "
                    f"edges; got {described(edge_label)}."
                )
            words = {"edge_label_index": str(kind), "neg_sampling": str(negative)}
            return pairs.shape[1], words | {"edge_label": str(getattr(edge_label, "dtype", None))}

        super().__init__(graph, num_neighbors, batch_size, inputs, **options)
        self._kind, self._negative = kind, negative
        self._ids, self._label = pairs.numpy(), None if edge_label is None else edge_label.cpu()
        self._keys = distinct(hashed(*self._ids))
        self._numbers = {end: numbers_of(graph.node_shards[end]) for end in ends(kind)}
        if edge_label is not None and negative is not None:
            least = [edge_label.min().item()] if len(edge_label) else []
            if min(sum(share(self.name, lambda: least, graph.group), [1])) == 0:
                self._label = edge_label.cpu() + 1

    def _seeds(self, messages: Messages) -> Seeds:
        chosen = self._chosen(messages)
        source, target = self._ids[:, chosen]
        key = hashed(source, target).sum(keepdims=True)
        first, last = ends(self._kind)
        if self._negative is not None:
            draws = np.arange(ceil(len(chosen) * self._negative.amount))
            numbers = [self._seed, *messages.call[:2], key]
            if self._negative.is_binary():
                drawn = uniform(*numbers, 0, draws) * self._graph.node_shards[first].num_nodes
                source = np.append(source, drawn.astype(np.int64))
            drawn = uniform(*numbers, 1, draws) * self._graph.node_shards[last].num_nodes
            target = np.append(target, drawn.astype(np.int64))
        by_type = {first: source, last: target}
        if first == last:
            by_type = {first: np.append(source, target)}
        unique = [np.unique(ids, return_inverse=True) for ids in by_type.values()]
        rows = [self._numbers[node_type] for node_type in by_type]
        tables, _ = fetch(rows, [ids for ids, _ in unique], messages)
        seeds = {k: table[0].astype(np.int64) for k, table in zip(by_type, tables, strict=True)}
        places = [torch.from_numpy(place) for _, place in unique]
        both = torch.cat(places).split([len(source), len(target)])
        return Seeds(seeds, key, (torch.from_numpy(chosen), *both))

    def _describe(self, batch: Any, seeds: Seeds) -> None:
        chosen, source, target = seeds.more
        first, last = ends(self._kind)
        edges: Any = batch if self._kind is None else batch[self._kind]
        edges.input_id = chosen
        if self._negative is not None and self._negative.is_triplet():
            start, end = (batch, batch) if self._kind is None else (batch[first], batch[last])
            start.src_index, end.dst_pos_index = source, target[: len(chosen)]
            shape = (len(chosen), int(self._negative.amount))
            end.dst_neg_index = target[len(chosen) :].reshape(shape).squeeze(-1)
            return
        edges.edge_label_index = torch.stack([source, target])
        label = None if self._label is None else self._label[chosen]
        if self._negative is not None:
            label = torch.ones(len(chosen), device="cpu") if label is None else label
            label = torch.cat([label, label.new_zeros(len(source) - len(chosen), *label.shape[1:])])
        edges.edge_label = label


def _given(edge_label_index: Any, graph: PartitionedGraph) -> tuple[EdgeType, Any]:
    """Return the type of the edges and their ends, None for the owned edges."""
    kind, given = None, edge_label_index
    if None not in graph.edge_shards and isinstance(given, tuple):
        kind, given = given if len(given) == 2 else (given, None)
    if kind not in graph.edge_shards:
        raise ArgumentError(
            f"edge_label_index must begin with one of the types {graph.edge_types}, such as "
            f"({graph.edge_types[0]}, ids); got {kind!r}."
        )
    return kind, given


def _negative(neg_sampling: Any, edge_label: Any) -> NegativeSampling | None:
    try:
        out: NegativeSampling | None = NegativeSampling.cast(neg_sampling)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f'neg_sampling must be "binary" or "triplet"; got {neg_sampling!r}: {error}'
        ) from error
    if out is not None and (out.src_weight is not None or out.dst_weight is not None):
        raise ArgumentError("neg_sampling draws nodes uniformly. Leave out its weights.")
    if out is not None and out.is_triplet() and edge_label is not None:
        raise ArgumentError("edge_label has no use for triplets. Leave it out.")
    return out
