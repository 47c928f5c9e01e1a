"""Other libraries with the same operations; each is imported only if it runs."""

import importlib
import importlib.metadata
import importlib.util
import sys
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as nn
from suite.task import PEER, contender
from torch.nn.functional import pad

from varcomm.cli.workload import ROOT

PACKAGES = {
    "anemoi": "anemoi-models",
    "fairchem": "fairchem-core",
    "physicsnemo": "nvidia-physicsnemo",
}


class CannotError(Exception):
    """The reason why a peer cannot run a case; raised on all ranks."""


def entered(case, layout, x, gradient):
    """Return the peers that can run a case, and the reasons of the others."""
    found, cannot = [], {}
    for name, way in PEERS.items():
        try:
            found.append(contender(name, PEER, way(case, layout), x, gradient))
        except CannotError as error:
            cannot[name] = str(error)
    return found, cannot


def versions():
    """Return the installed version of each package."""
    found = {}
    for package in PACKAGES.values():
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def padded(case, layout):
    """The padded gather: the usual workaround if an engine refuses uneven shards."""
    if case.operation != "all_gather_v" or case.backward:
        raise CannotError("gathers, forward")
    largest, sizes = max(layout.sizes), layout.sizes

    @torch.no_grad()
    def gather(x):
        places = [x.new_empty(largest, x.shape[1]) for _ in sizes]
        dist.all_gather(places, pad(x, (0, 0, 0, largest - len(x))))
        return torch.cat([place[:size] for place, size in zip(places, sizes, strict=True)])

    return gather


def torch_nn(case, layout):
    """torch.distributed.nn; uneven shards are padded and cut if a function needs even shards."""
    uneven = len(set(layout.sizes)) > 1
    if case.operation == "reduce_scatter_v" and case.backward and uneven:
        raise CannotError("the backward of its reduce_scatter gathers even shards only")
    ways = {
        "all_gather_v": lambda x: cut(nn.all_gather(fill(x, layout)), layout),
        "reduce_scatter_v": lambda x: nn.reduce_scatter(
            x.new_empty(layout.mine, layout.width), list(x.split(layout.sizes))
        ),
        "all_to_all_v": partial(nn_all_to_all, layout=layout),
        "gather_v": partial(nn_gather, layout=layout),
        "scatter_v": partial(nn_scatter, layout=layout),
        "indexed_all_to_all_v": lambda x: nn_all_to_all(x.index_select(0, layout.index), layout),
    }
    if case.operation not in ways:
        raise CannotError(f"has no {case.operation}")
    return ways[case.operation]


def fill(x, layout):
    return pad(x, (0, 0, 0, max(layout.sizes) - len(x)))


def cut(places, layout):
    return torch.cat([place[:size] for place, size in zip(places, layout.sizes, strict=True)])


def nn_all_to_all(x, layout):
    out = x.new_empty(sum(layout.recv), layout.width)
    return nn.all_to_all_single(out, x, layout.recv, layout.send)


def nn_gather(x, layout):
    places = nn.gather(fill(x, layout), ROOT)
    return cut(places, layout) if layout.rank == ROOT else places[ROOT][:0]


def nn_scatter(x, layout):
    # zeros on non-root ranks belong to the graph
    parts = x.split(layout.sizes) if layout.rank == ROOT else [x] * layout.world
    return nn.scatter([fill(part, layout) for part in parts], ROOT)[: layout.mine]


def anemoi(case, layout):
    """anemoi-models of ECMWF; its sums write into their input in fp32."""
    graph, group = anemoi_module("graph"), dist.group.WORLD
    if case.operation == "all_gather_v":
        return lambda x: graph.sync_tensor(x, 0, layout.sizes, group)
    if case.operation == "reduce_scatter_v":
        return lambda x: graph.reduce_shard_tensor(x, 0, layout.sizes, group)
    if case.operation == "indexed_all_to_all_v":
        raise CannotError("its halo exchange appends own rows: see --suite plan")
    raise CannotError(f"has no {case.operation}")


def anemoi_module(name):
    try:
        return importlib.import_module(f"anemoi.models.distributed.{name}")
    except ImportError as error:
        if (error.name or "").split(".")[0] == "anemoi":
            raise CannotError("anemoi-models is not installed") from None
        raise CannotError(f"cannot be imported: {error}") from None


def anemoi_halo(layout):
    """anemoi's exchange, from own rows to own rows and the halo."""
    graph, halo = anemoi_module("graph"), anemoi_module("halo")
    info = halo.HaloInfo(
        num_local_nodes=layout.mine,
        num_halo_nodes=sum(layout.recv),
        send_indices=tuple(layout.indices(layout.rank)),
        recv_counts=tuple(layout.recv),
        recv_global_ids=None,
        edge_index_local=torch.empty(2, 0, dtype=torch.int64),
    )
    return lambda x: graph.halo_exchange(x, info, dist.group.WORLD)


def physicsnemo(case, layout):
    """nvidia-physicsnemo: its V-operations.

    They use torch.distributed's all-to-all of lists, which Gloo refuses for uneven tensors. Sends
    and receives replace it on Gloo, the only change to the library.
    """
    autograd, utils = physicsnemo_modules()
    if case.engine == "gloo" and not isinstance(utils.dist, WithAllToAll):
        utils.dist = WithAllToAll()
    sizes, rank, name = layout.sizes, layout.rank, case.operation
    if name == "all_gather_v":
        if case.engine == "gloo" and len(set(sizes)) > 1:
            raise CannotError("its all_gather_v passes uneven shards to Gloo, which refuses them")
        return lambda x: autograd.all_gather_v(x, sizes)
    if name == "reduce_scatter_v":
        if case.backward:
            raise CannotError("its sum of shards is a backward, and has none of its own")
        return lambda x: utils.all_gather_v_bwd_wrapper(x, sizes)
    if name == "gather_v":
        end = None if rank == ROOT else 0  # its memory on non-root ranks is not initialised
        return lambda x: autograd.gather_v(x, sizes, 0, ROOT)[:end]
    if name == "scatter_v":
        # its backward returns a gradient of the full shape on all ranks, so inputs have that shape
        rows = layout.total if case.backward and rank != ROOT else 0
        return lambda x: autograd.scatter_v(pad(x, (0, 0, 0, rows)) if rows else x, sizes, 0, ROOT)
    if name == "indexed_all_to_all_v":
        indices = layout.indices(rank)
        return lambda x: autograd.indexed_all_to_all_v(x, indices, layout.matrix)
    raise CannotError(f"has no {name}")


class WithAllToAll:
    """torch.distributed with another all-to-all of lists."""

    def __getattr__(self, name):
        return getattr(dist, name)

    def all_to_all(self, places, pieces, group=None):
        rank = dist.get_rank(group)
        others = [peer for peer in range(len(places)) if peer != rank]
        works = [
            dist.irecv(places[i], group=group, group_src=i) for i in others if places[i].numel()
        ]
        works += [
            dist.isend(pieces[i], group=group, group_dst=i) for i in others if pieces[i].numel()
        ]
        places[rank].copy_(pieces[rank])
        for work in works:
            work.wait()


@cache
def physicsnemo_modules():
    """Import its collectives without the dependencies of the package."""
    names = ("distributed.autograd", "distributed.utils")
    tree = {"treelib": {"Tree": object}}  # which only other parts use
    return modules("physicsnemo", ("", "core", "distributed"), names, tree)


@cache
def fairchem_modules():
    """Import its exchange of atoms without the dependencies of the package."""
    names = ("gp_utils", "parallelism.graph_parallel_a2a")
    folders = ("", "core", "core.common", "core.common.parallelism")
    stubs = {"omegaconf": {"OmegaConf": object}}
    return modules("fairchem", folders, [f"core.common.{name}" for name in names], stubs)


def modules(package, folders, names, stubs):
    """Import modules of a package, without the __init__ of folders if they need other packages."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise CannotError(f"{PACKAGES[package]} is not installed")
    names = [f"{package}.{name}" for name in names]
    try:
        return tuple(map(importlib.import_module, names))
    except ImportError:
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
    for folder in folders:
        name = f"{package}.{folder}".rstrip(".")
        sys.modules[name] = ModuleType(name)
        path = next(iter(found.submodule_search_locations))
        sys.modules[name].__path__ = ["/".join([path, *folder.split(".")]).rstrip("/")]
    for name, members in stubs.items():
        if importlib.util.find_spec(name) is None:
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(members)
    try:
        return tuple(map(importlib.import_module, names))
    except ImportError as error:
        raise CannotError(f"cannot be imported: {error}") from None


PEERS = {"padded": padded, "torch.nn": torch_nn, "anemoi": anemoi, "physicsnemo": physicsnemo}


def gathered_halo(layout, halo_ids):
    """torch.distributed.nn: all rows of all ranks, padded."""
    starts, most = torch.tensor(layout.sizes).cumsum(0), max(layout.sizes)
    owners = torch.bucketize(halo_ids, starts, right=True)
    at = halo_ids - (starts - torch.tensor(layout.sizes))[owners] + owners * most
    rows = torch.cat([torch.arange(layout.mine) + layout.rank * most, at])
    return lambda x: torch.cat(nn.all_gather(fill(x, layout))), rows


def anemoi_rows(layout, halo_ids):
    """anemoi's exchange returns own rows and the halo."""
    return anemoi_halo(layout), torch.arange(layout.mine + len(halo_ids))


def physicsnemo_halo(layout, halo_ids):
    """nvidia-physicsnemo: the one message of its DistributedGraph, which carries own rows too."""
    autograd, utils = physicsnemo_modules()
    if dist.get_backend() == "gloo" and not isinstance(utils.dist, WithAllToAll):
        utils.dist = WithAllToAll()
    rank, mine, indices = layout.rank, layout.mine, layout.indices(layout.rank)
    matrix = [list(row) for row in layout.matrix]
    matrix[rank][rank], indices[rank] = mine, torch.arange(mine)
    before, total = sum(layout.recv[:rank]), mine + len(halo_ids)
    rows = torch.arange(total)
    own = (rows >= before) & (rows < before + mine)
    rows = torch.cat([rows[own], rows[~own]])
    return lambda x: autograd.indexed_all_to_all_v(x, indices, matrix), rows


def fairchem_halo(layout, halo_ids):
    """fairchem-core: the exchange of its all-to-all mode, after which layers append own rows."""
    gp_utils, a2a = fairchem_modules()
    gp_utils._GRAPH_PARALLEL_GROUP = dist.group.WORLD
    send, recv = list(layout.send), list(layout.recv)
    index = torch.cat(layout.indices(layout.rank))
    context = SimpleNamespace(send_indices=index, send_splits=send, recv_splits=recv)
    rows = torch.arange(layout.mine + len(halo_ids))
    return lambda x: torch.cat([x, a2a.all_to_all_collect(x, context)]), rows


# From a layout and the global ids of the halo, a function of own rows, and the places of own rows
# and of the halo in its result.
HALOS = {
    "all-gather of torch.distributed.nn": gathered_halo,
    "anemoi": anemoi_rows,
    "fairchem": fairchem_halo,
    "physicsnemo": physicsnemo_halo,
}
