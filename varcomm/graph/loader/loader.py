"""Base class of the loaders: batches sampled ahead by a thread, on an auxiliary group."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler.base import NumNeighbors

from varcomm.errors import ArgumentError, at_least, exact_int
from varcomm.graph.build.pyg_data import ends
from varcomm.graph.draws import Array, hashed
from varcomm.graph.loader.cache import often_fetched
from varcomm.graph.loader.in_edges import InEdges
from varcomm.graph.loader.messages import Messages
from varcomm.graph.loader.sampler import Sample, Sampler
from varcomm.graph.loader.stored_rows import StoredRows, fetch, small, stored_rows
from varcomm.graph.node_shard import described
from varcomm.graph.partitioned_graph import EdgeType, NodeType, PartitionedGraph
from varcomm.ops.digest import require_equal
from varcomm.transport.agreement import agree_and_share
from varcomm.transport.auxiliary_group import free_lanes, take_lane
from varcomm.transport.group import Group

T = TypeVar("T")

_REFUSED = {
    "time_attr": "temporal sampling is not available",
    "input_time": "temporal sampling is not available",
    "edge_label_time": "temporal sampling is not available",
    "disjoint": "trees per seed are not available",
    "num_workers": "a thread samples ahead; set prefetch=",
    "persistent_workers": "a thread samples ahead; set prefetch=",
    "filter_per_worker": "a thread samples ahead; set prefetch=",
    "pin_memory": "batches for a GPU are pinned",
    "is_sorted": "edges are sorted once, on their ranks",
    "generator": "set seed=",
    "temporal_strategy": "temporal sampling is not available",
    "neg_sampling_ratio": "set neg_sampling=",
    "directed": 'set subgraph_type="induced" for directed=False',
}


@dataclass(frozen=True)
class LoaderReport:
    """Nodes and edges that this rank has sampled, also ahead, and hits of the cache.

    Attributes
    ----------
    batches, nodes, edges : int
        Sampled batches, and their nodes and edges.
    remote : int
        Nodes that other ranks own.
    cached : int
        Those of them that the cache had.

    Examples
    --------
    >>> import varcomm
    >>> report = varcomm.graph.LoaderReport(batches=2, nodes=90, edges=200, remote=40, cached=10)
    >>> print(report)
    2 batches, 90 nodes and 200 edges; 40 nodes of other ranks, 25.0 % in the cache
    >>> report.hit_rate
    0.25
    """

    batches: int = 0
    nodes: int = 0
    edges: int = 0
    remote: int = 0
    cached: int = 0

    @property
    def hit_rate(self) -> float:
        """The share of remote nodes that the cache had; 0 if there was no remote node."""
        return self.cached / max(1, self.remote)

    def __str__(self) -> str:
        return (
            f"{self.batches:,} batches, {self.nodes:,} nodes and {self.edges:,} edges; "
            f"{self.remote:,} nodes of other ranks, {100 * self.hit_rate:.1f} % in the cache"
        )


@dataclass(frozen=True)
class Seeds:
    """Seeds of one batch: global numbers by type, and what depends on the kind of loader."""

    numbers: Mapping[NodeType, Array]
    key: Array  # sum of the hashes of the seeds: equal seeds have equal samples on any ranks
    more: Any


class Loader:
    """An iterable over sampled batches; all ranks iterate together."""

    name: str
    _keys: Array  # of the inputs, for their order

    def __init__(
        self,
        graph: PartitionedGraph,
        num_neighbors: Any,
        batch_size: int,
        count_inputs: Callable[[], tuple[int, dict[str, str]]],
        *,
        replace: bool = False,
        subgraph_type: str = "directional",
        shuffle: bool = True,
        seed: int = 0,
        prefetch: int = 1,
        weight_attr: str | None = None,
        drop_last: bool = False,
        cache: int = 0,
        transform: Callable[[Any], Any] | None = None,
        **others: object,
    ) -> None:
        if not isinstance(graph, PartitionedGraph):
            raise ArgumentError(
                f"{self.name}: graph must be a PartitionedGraph; got {described(graph)}."
            )
        batch_size, seed, prefetch = map(_plain, (batch_size, seed, prefetch))
        same = {"batch_size": batch_size, "replace": replace, "subgraph_type": subgraph_type}
        same |= {"shuffle": shuffle, "seed": seed, "prefetch": prefetch, "drop_last": drop_last}

        def check() -> tuple[dict[EdgeType, list[int]], int, dict[str, str]]:
            for name in others:
                raise ArgumentError(
                    f"{name}: {_REFUSED.get(name, 'there is no such argument')}. Leave it out."
                )
            if graph.group.simulated:
                raise ArgumentError("a simulated group has no other ranks to sample from.")
            if subgraph_type not in ("directional", "induced"):
                raise ArgumentError(
                    f'subgraph_type must be "directional" or "induced"; got {subgraph_type!r}. For '
                    "edges in both directions, partition the result of PyG's ToUndirected()."
                )
            at_least(1, batch_size, "batch_size")
            at_least(0, prefetch, "prefetch")
            at_least(0, cache, "cache")
            if exact_int(seed) is None:
                raise ArgumentError(f"seed must be an integer; got {seed!r}.")
            for edge, shard in graph.edge_shards.items():
                weight = shard.attributes.get(weight_attr or "", shard.ids)
                is_valid = weight_attr in (None, *shard.attributes) and weight.dim() == 1
                if not is_valid or not bool(((weight >= 0) & weight.isfinite()).all()):
                    raise ArgumentError(
                        f"weight_attr={weight_attr!r} must name an attribute (E,) of edges"
                        f"{f' {edge}' if edge else ''}, finite and not negative."
                    )
            return fan_outs_of(num_neighbors, graph), *count_inputs()

        def outline(own: tuple[dict[EdgeType, list[int]], int, dict[str, str]]) -> dict[str, Any]:
            words = {
                "num_neighbors": str(own[0]),
                "weight_attr": weight_attr,
                "cache": cache > 0,
                **same,
                **own[2],
            }
            return {"words": words, "inputs": own[1], "lanes": free_lanes(graph.group, "gloo")}

        (fan_outs, *_), of_ranks = agree_and_share(self.name, check, outline, graph.group)
        require_equal(self.name, [rank["words"] for rank in of_ranks])
        inputs = [rank["inputs"] for rank in of_ranks]
        self._steps: int = min(inputs) // batch_size if drop_last else -(-max(inputs) // batch_size)
        self._graph, self._batch_size, self._prefetch = graph, batch_size, prefetch
        self._shuffle, self._seed, self._transform = shuffle, seed % 2**63, transform
        self._device = next(iter(graph.node_shards.values())).ids.device
        self._epoch = self._first = 0
        self._position = (0, 0)
        self._counts = LoaderReport()
        nodes = {kind: stored_rows(of, of.num_owned) for kind, of in graph.node_shards.items()}
        edges = {
            kind: (_in_edges(graph, kind, weight_attr), stored_rows(of, of.num_owned))
            for kind, of in graph.edge_shards.items()
        }
        self._sampler = Sampler(nodes, edges, fan_outs, replace, subgraph_type == "induced")
        # the lane lets the thread communicate in any order relative to the caller's messages
        self._lane = take_lane(graph.group, [rank["lanes"] for rank in of_ranks], "gloo")
        self._ended: list[Future[Callable[[], None] | None]] = []
        self._thread = ThreadPoolExecutor(1, self.name)  # one, so that its messages have one order
        self._order: tuple[int, Array] = -1, np.arange(0)
        if self._lane is not None:
            weakref.finalize(self, self._lane.give_back)
        if cache:
            numbers = [often_fetched(graph, kind, cache) for kind in nodes]
            tables, _ = fetch(list(nodes.values()), numbers, self._messages(-1, 0))
            for rows, own, table in zip(nodes.values(), numbers, tables, strict=True):
                rows.cached, rows.cache = own, table

    def _messages(self, epoch: int, batch: int, is_end: bool = False) -> Messages:
        group: Group = self._graph.group if self._lane is None else self._lane.group()
        return Messages(group, (epoch, batch, is_end), self.name)

    def __len__(self) -> int:
        """Return the number of batches of an epoch, equal on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Data | HeteroData]:
        """Iterate over the batches of one epoch; collective."""
        self._compare_ends()
        epoch, step, submitted = self._epoch, self._first, self._first
        self._epoch, self._first = epoch + 1, 0
        failed = threading.Event()
        pending: deque[Future[Data | HeteroData]] = deque()
        try:
            while step < len(self):
                while submitted < min(len(self), step + 1 + self._prefetch):
                    sampled = partial(self._sampled, self._messages(epoch, submitted))
                    pending.append(self._thread.submit(self._guarded, failed, sampled))
                    submitted += 1
                step += 1
                self._position = (epoch, step)
                yield self._delivered(pending.popleft())
        finally:
            self._position = (epoch + 1, 0)
            with suppress(RuntimeError):  # the group or the interpreter has ended
                end = self._messages(epoch, step, is_end=True).start_comparing
                self._ended.append(self._thread.submit(self._guarded, failed, end))
        self._compare_ends()

    def _compare_ends(self) -> None:
        """Raise on all ranks if they have left a loop at different batches."""
        while self._ended:
            finish = self._ended.pop(0).result()
            if finish is not None:
                finish()

    def _guarded(self, failed: threading.Event, call: Callable[[], T]) -> T | None:
        """Run a call in the thread. After an error, skip later calls: ranks send other messages."""
        if failed.is_set():
            return None
        try:
            return call()
        except BaseException as error:
            failed.set()
            if self._lane is not None:
                self._lane.leave(error, self.name)
            raise

    def _delivered(self, sampled: Future[Data | HeteroData]) -> Any:
        batch: Any = sampled.result()
        if self._device.type != "cpu":
            batch = batch.to(self._device, non_blocking=True)
        for name, value in self._graph.attributes.items():
            batch[name] = value
        return batch if self._transform is None else self._transform(batch)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch and the number of batches that were used of it, and the seed."""
        epoch, batch = self._position
        return {"epoch": epoch, "batch": batch, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration go on where :meth:`state_dict` was called."""
        if state["seed"] != self._seed:
            raise ArgumentError(
                f"{self.name}.load_state_dict: the state has seed={state['seed']}, and the loader "
                f"seed={self._seed}. Pass the same seed to both."
            )
        self._position = self._epoch, self._first = state["epoch"], state["batch"]

    def report(self) -> LoaderReport:
        """Return counts of sampled nodes and edges, and the hit rate of the cache."""
        return self._counts

    def _chosen(self, messages: Messages) -> Array:
        """Return the positions of a batch among the inputs."""
        epoch, batch, _ = messages.call
        if self._order[0] != epoch:
            order = np.arange(len(self._keys))
            if self._shuffle:
                order = np.argsort(hashed(self._seed, epoch, self._keys), kind="stable")
            self._order = epoch, order
        return self._order[1][batch * self._batch_size : (batch + 1) * self._batch_size]

    def _seeds(self, messages: Messages) -> Seeds:
        """Return the seeds of a batch; collective."""
        raise NotImplementedError

    def _describe(self, batch: Any, seeds: Seeds) -> None:
        """Add the attributes of the seeds to a batch."""
        raise NotImplementedError

    def _sampled(self, messages: Messages) -> Data | HeteroData:
        """Return a batch, on the CPU; in the thread, collective."""
        messages.start_comparing()()
        seeds = self._seeds(messages)
        key = hashed(self._seed, *messages.call) + seeds.key
        sample = self._sampler.sample(seeds.numbers, key, messages)
        kinds = list(self._sampler.nodes)
        tables = [self._sampler.nodes[kind] for kind in kinds]
        rows, seen = fetch(tables, [sample.nodes[kind] for kind in kinds], messages)
        batch = self._assembled(sample, dict(zip(kinds, rows, strict=True)))
        self._describe(batch, seeds)
        batch = batch.pin_memory() if self._device.type == "cuda" else batch
        remote, cached = np.sum(seen, axis=0)
        self._counts = LoaderReport(
            self._counts.batches + 1,
            self._counts.nodes + sum(map(len, sample.nodes.values())),
            self._counts.edges + sum(store.num_edges for store in batch.edge_stores),
            self._counts.remote + int(remote),
            self._counts.cached + int(cached),
        )
        return batch

    def _assembled(self, sample: Sample, rows: Mapping[NodeType, Sequence[Array]]) -> Any:
        """Return a batch with the attributes and ids that PyG's loaders return."""
        batch: Any = Data() if None in self._graph.node_shards else HeteroData()
        for kind, of in self._sampler.nodes.items():
            store = batch if kind is None else batch[kind]
            store.num_nodes = len(sample.nodes[kind])
            _fill(store, "n_id", rows[kind], of)
            if not self._sampler.induced:
                store.num_sampled_nodes = sample.discovered[kind]
        for edge, (_, of) in self._sampler.edges.items():
            store = batch if edge is None else batch[edge]
            both = [np.concatenate(of_hops[edge]) for of_hops in (sample.sources, sample.targets)]
            store.edge_index = torch.from_numpy(np.stack(both))
            columns = zip(*sample.rows[edge], strict=True)
            _fill(store, "e_id", [np.concatenate(column) for column in columns], of)
            if not self._sampler.induced:
                store.num_sampled_edges = [len(hop) for hop in sample.sources[edge]]
        return batch


def _fill(store: Any, ids: str, columns: Sequence[Array], of: StoredRows) -> None:
    store[ids] = torch.from_numpy(columns[0].astype(np.int64))
    for (name, like), column in zip(of.like.items(), columns[1:], strict=True):
        rows = torch.from_numpy(column)
        shape = (len(rows), *like.shape[1:])
        store[name] = (
            rows.view(like.dtype).reshape(shape) if rows.numel() else like.new_empty(shape)
        )


def _plain(value: Any) -> Any:
    exact = exact_int(value)
    return value if exact is None else exact


def fan_outs_of(num_neighbors: Any, graph: PartitionedGraph) -> dict[EdgeType, list[int]]:
    """Return the neighbours per hop for each type of edges."""
    try:
        if None not in graph.edge_shards:
            kinds: Any = graph.edge_types
            out: dict[EdgeType, Any] = dict(NumNeighbors(num_neighbors).get_values(kinds))
        else:
            out = {None: num_neighbors}
        out = {
            kind: [at_least(-1, each, "num_neighbors") for each in of] for kind, of in out.items()
        }
        if not all(out.values()):
            raise ValueError("there is no hop")
    except (ArgumentError, ValueError, TypeError, AssertionError) as error:
        raise ArgumentError(
            "num_neighbors must be a list with an integer per hop, -1 for all neighbours, or a "
            f"dict of such lists by type of edges; got {num_neighbors!r}: {error}"
        ) from error
    return out


def _in_edges(graph: PartitionedGraph, kind: EdgeType, weight_attr: str | None) -> InEdges:
    """Return edges of one type by target, with global numbers of their sources; collective."""
    shard = graph.edge_shards[kind]
    nodes = graph.node_shards[ends(kind)[0]]
    source, target = shard.local_ids[:, : shard.num_owned].cpu()
    own = torch.arange(nodes.num_owned, device="cpu") + nodes.sizes.offsets[graph.group.rank]
    number = torch.cat([own, nodes.directory.look_up(shard.halo_ids).cpu()])
    weight = (
        None
        if weight_attr is None
        else shard.attributes[weight_attr].detach().cpu().double().numpy()
    )
    source = small(number.numpy(), nodes.sizes.total)[source.numpy()]
    return InEdges.of(target.numpy(), source, shard.num_targets, weight)
