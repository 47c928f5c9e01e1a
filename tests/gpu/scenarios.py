"""Scenarios that name every public function with tensors: what a user's program does in each step.

``make(device, rank, ranks)`` sets up on all ranks and returns a step, which may run any number of
times and returns tensors. Inputs are drawn identically for every device. A scenario states how
often the host may look at values of a GPU in a later step.
"""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.data import HeteroData

import varcomm as vc
from tests.graph.graphs import split_by, wild
from varcomm import checkpoint, data_parallel, graph, models
from varcomm import tensor_parallel as tp

ROWS = (3, 0, 2, 4, 1)  # per rank; the second rank is empty
CLASSES = 11


@dataclass(frozen=True)
class Scenario:
    """What a program calls, and how often the host may look in a later step."""

    covers: tuple[str, ...]
    make: Callable
    looks: int | None = 0  # None for any number
    reason: str = ""


SCENARIOS: dict[str, Scenario] = {}


def scenario(*covers, looks=0, reason=""):
    """Add a function to the table; `covers` are public names below ``varcomm``."""

    def added(make):
        assert looks == 0 or reason, make.__name__
        SCENARIOS[make.__name__] = Scenario(covers, make, looks, reason)
        return make

    return added


def drawn(device, *shape, dtype=torch.float64, seed=0):
    """Draw a tensor on the CPU, and move it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype).to(device)


def numbers(device, high, *shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(high, shape, generator=generator).to(device)


def differentiated(op, *inputs):
    """Return the step that applies `op`, and differentiates the sum of the squares."""
    leaves = [x.requires_grad_() for x in inputs]

    def step():
        out = op(*leaves)
        outs = out if isinstance(out, list | tuple) else [out]
        loss = sum(y.square().sum() for y in outs)
        return [*outs, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    return step


def twice(op, x):
    """Return the step that takes first and second derivatives."""
    x.requires_grad_()

    def step():
        y = op(x)
        (first,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        return [y, first, second]

    return step


def trained(module, loss_of, sums=True):
    """Return a training step of `module`: loss, backward, sum of gradients, optimizer."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        if sums:
            data_parallel.sum_gradients(module)
        optimizer.step()
        return [loss, *(p.grad for p in module.parameters())]

    return step


# --- Collectives


@scenario("all_gather_v")
def all_gather_v(device, rank, ranks):
    return twice(lambda x: vc.all_gather_v(x, ROWS[:ranks]), drawn(device, ROWS[rank], 2))


@scenario("all_gather_v")
def all_gather_v_of_bf16_along_dim_1(device, rank, ranks):
    x = drawn(device, 2, ROWS[rank], dtype=torch.bfloat16)
    return differentiated(lambda x: vc.all_gather_v(x, ROWS[:ranks], dim=1), x)


@scenario("reduce_scatter_v")
def reduce_scatter_v(device, rank, ranks):
    sizes = ROWS[:ranks]
    return twice(lambda x: vc.reduce_scatter_v(x, sizes), drawn(device, sum(sizes), 2, seed=rank))


@scenario("gather_v")
def gather_v(device, rank, ranks):
    x = drawn(device, ROWS[rank], 2)
    return differentiated(lambda x: vc.gather_v(x, ROWS[:ranks], dst=ranks - 1), x)


@scenario("scatter_v")
def scatter_v_with_like(device, rank, ranks):
    sizes = ROWS[:ranks]
    return differentiated(lambda x: vc.scatter_v(x, sizes, like=x), drawn(device, sum(sizes), 2))


@scenario("scatter_v", looks=0)
def scatter_v(device, rank, ranks):
    sizes = ROWS[:ranks]
    x = drawn(device, sum(sizes), 2) if rank == 0 else None
    return lambda: [vc.scatter_v(x, sizes)]


@scenario("all_to_all_v")
def all_to_all_v(device, rank, ranks):
    send = [(rank + 2 * to) % 3 for to in range(ranks)]
    recv = [(of + 2 * rank) % 3 for of in range(ranks)]
    return twice(lambda x: vc.all_to_all_v(x, send, recv), drawn(device, sum(send), 2))


@scenario("transpose_v")
def transpose_v(device, rank, ranks):
    columns = ROWS[:ranks][::-1]
    x = drawn(device, ROWS[rank], sum(columns))
    return differentiated(lambda x: vc.transpose_v(x, 1, columns, 0, ROWS[:ranks]), x)


@scenario("shard_v")
def shard_v(device, rank, ranks):
    return twice(lambda x: vc.shard_v(x, ROWS[:ranks]), drawn(device, sum(ROWS[:ranks]), 2))


@scenario("all_reduce")
def all_reduce(device, rank, ranks):
    return twice(vc.all_reduce, drawn(device, 5, seed=rank))


@scenario("all_reduce")
def all_reduce_in_two_rounds(device, rank, ranks):
    return differentiated(vc.all_reduce, drawn(device, 50_001, seed=rank, dtype=torch.bfloat16))


@scenario("reduce")
def reduce(device, rank, ranks):
    return twice(lambda x: vc.reduce(x, dst=ranks - 1), drawn(device, 5, seed=rank))


@scenario("broadcast")
def broadcast_with_like(device, rank, ranks):
    x = drawn(device, 5)
    return twice(lambda x: vc.broadcast(x, like=x), x)


@scenario("broadcast")
def broadcast(device, rank, ranks):
    x = drawn(device, 5) if rank == 0 else None
    return lambda: [vc.broadcast(x)]


@scenario("broadcast_module")
def broadcast_module(device, rank, ranks):
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    vc.broadcast_module(model)
    x = drawn(device, 5, 3, dtype=torch.float32)
    return differentiated(lambda x: model(x), x)


@scenario("Handle")
def handles(device, rank, ranks):
    x = drawn(device, ROWS[rank], 2).requires_grad_()

    def step():
        gathered = vc.all_gather_v(x, ROWS[:ranks], async_op=True)
        total = vc.all_reduce(x.sum(), async_op=True)
        y = gathered.wait() * total.wait()
        return [y, *torch.autograd.grad(y.square().sum(), x)]

    return step


@scenario("indexed_all_to_all_v", looks=1, reason="the indices of a single call are checked")
def indexed_all_to_all_v(device, rank, ranks):
    rows = 4
    counts = [[1 + (of + to) % 3 for to in range(ranks)] for of in range(ranks)]
    indices = [numbers(device, rows, n, seed=rank) for n in counts[rank]]
    x = drawn(device, rows, 2, seed=rank)
    return differentiated(lambda x: vc.indexed_all_to_all_v(x, indices, counts), x)


# --- Plans


def needed(device, rank, ranks):
    """Return rows that this rank needs: its neighbours' and its own, some twice."""
    total = sum(ROWS[:ranks])
    owners = vc.ShardSizes(ROWS[:ranks]).owner
    rows = numbers("cpu", total, 7, seed=rank)
    return rows[owners(rows).argsort(stable=True)].to(device)


@scenario("ExchangePlan")
def plan(device, rank, ranks):
    made = vc.ExchangePlan.from_needed(needed(device, rank, ranks), ROWS[:ranks])
    return twice(made, drawn(device, ROWS[rank], 2, seed=rank))


@scenario("ExchangePlan")
def plan_made_on_the_cpu_and_moved(device, rank, ranks):
    made = vc.ExchangePlan.from_needed(needed("cpu", rank, ranks), ROWS[:ranks]).to(device)
    x = drawn(device, 2, ROWS[rank], dtype=torch.bfloat16)
    return differentiated(lambda x: made(x, dim=1), x)


@scenario("ExchangePlan")
def plan_started_and_its_adjoint(device, rank, ranks):
    made = vc.ExchangePlan.from_needed(needed(device, rank, ranks), ROWS[:ranks])
    own, got = drawn(device, ROWS[rank], 2), drawn(device, 7, 2, seed=1)

    def op(own, got):
        handle = made.start(own)
        back = made.adjoint(got)
        return [handle.wait(), back]

    return differentiated(op, own, got)


@scenario("ExchangePlan")
def plan_of_several_tensors(device, rank, ranks):
    part = graph.partition(wild(), method="block").to(device)
    pair = [drawn(device, part.num_owned, 2), drawn(device, part.num_owned, 3, seed=1)]
    return differentiated(lambda *xs: part.with_halo(list(xs)), *pair)


# --- Gradients


def mlp(device, seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    return nn.Sequential(*layers).double().to(device)


@scenario("data_parallel.sum_gradients")
def sum_gradients(device, rank, ranks):
    model, x = mlp(device), drawn(device, ROWS[rank], 4)
    return trained(model, lambda: model(x).square().sum())


UNUSED = "whether another rank has used a parameter that this rank has not"


def mlp_or_part(device, rank):
    """Return a model, and its output for this rank: rank 1 leaves out parameters of two layers."""
    model, x = mlp(device), drawn(device, 2 + rank, 4)
    return model, lambda: x + model[0].bias[:4] if rank == 1 else model(x)


@scenario("data_parallel.sum_gradients", looks=1, reason=UNUSED)
def sum_gradients_of_unused_parameters(device, rank, ranks):
    model, out = mlp_or_part(device, rank)

    def step():
        model.zero_grad()
        out().square().sum().backward()
        data_parallel.sum_gradients(model, bucket_bytes=64)
        return [p.grad for p in model.parameters()]

    return step


@scenario("data_parallel.GlobalCount", "data_parallel.sum_gradients")
def global_count(device, rank, ranks):
    model, x, count = mlp(device), drawn(device, ROWS[rank], 4), data_parallel.GlobalCount()

    def step():
        model.zero_grad()
        count.reset()
        count.add(len(x))
        model(x).square().sum().backward()
        data_parallel.sum_gradients(model, reduce=count)
        return [p.grad for p in model.parameters()]

    return step


@scenario("data_parallel.ShardedGradients")
def sharded_gradients(device, rank, ranks):
    model, x = mlp(device), drawn(device, 2 + rank, 4)
    optimizer = data_parallel.ShardedGradients(model, lambda p: torch.optim.SGD(p, lr=0.1))
    return sharded_step(optimizer, model, x)


@scenario("data_parallel.ShardedGradients")
def sharded_gradients_clipped(device, rank, ranks):
    model, x = mlp(device), drawn(device, 2 + rank, 4)
    how = {"reduce": "sum", "bucket_bytes": 64}
    optimizer = data_parallel.ShardedGradients(model, torch.optim.AdamW, **how)
    return sharded_step(optimizer, model, x, lambda: optimizer.clip_grad_norm_(1.0))


@scenario("data_parallel.ShardedGradients")
def sharded_gradients_clipped_by_value(device, rank, ranks):
    model, x = mlp(device), drawn(device, 2 + rank, 4)
    optimizer = data_parallel.ShardedGradients(model, torch.optim.AdamW, sizes="whole-parameters")
    return sharded_step(optimizer, model, x, lambda: optimizer.clip_grad_value_(0.1))


@scenario("data_parallel.ShardedGradients", looks=1, reason=UNUSED)
def sharded_gradients_of_unused_parameters(device, rank, ranks):
    model, out = mlp_or_part(device, rank)
    optimizer = data_parallel.ShardedGradients(model, torch.optim.SGD, bucket_bytes=64)

    def step():
        optimizer.zero_grad()
        loss = out().square().sum()
        loss.backward()
        optimizer.step()
        return [loss, *(p.detach().clone() for p in model.parameters())]

    return step


def sharded_step(optimizer, model, x, before=lambda: None):
    def step():
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.reduce()
        before()
        optimizer.step()
        return [loss, *(p.detach().clone() for p in model.parameters())]

    return step


# --- Tensor parallelism


@scenario("tensor_parallel.ColumnParallelLinear", "tensor_parallel.RowParallelLinear")
def linears(device, rank, ranks):
    torch.manual_seed(0)
    model = nn.Sequential(tp.ColumnParallelLinear(4, 7), nn.ReLU(), tp.RowParallelLinear(7, 4))
    model.to(device)
    x = drawn(device, 5, 4, dtype=torch.float32)
    return trained(model, lambda: model(x).square().sum(), sums=False)


@scenario("tensor_parallel.column_parallel_linear", "tensor_parallel.row_parallel_linear")
def linears_with_sequence_shards(device, rank, ranks):
    rows, wide = ROWS[:ranks], (2, 3, 1, 0, 4)[rank]
    x, up, down = drawn(device, rows[rank], 4), drawn(device, wide, 4), drawn(device, 4, wide)

    def op(x, up, down):
        y = tp.column_parallel_linear(x, up, sequence_sizes=rows)
        return tp.row_parallel_linear(y.tanh(), down, sequence_sizes=rows)

    return differentiated(op, x, up, down)


@scenario("tensor_parallel.VocabParallelEmbedding")
def vocab_parallel_embedding(device, rank, ranks, exchange=None):
    torch.manual_seed(0)
    layer = tp.VocabParallelEmbedding(CLASSES, 4, padding_idx=3, exchange=exchange).to(device)
    ids = numbers(device, CLASSES, 2, 6)
    return trained(layer, lambda: layer(ids).square().sum(), sums=False)


@scenario("tensor_parallel.vocab_parallel_embedding", "tensor_parallel.vocab_range")
def vocab_parallel_embedding_with_sequence_shards(device, rank, ranks, exchange=None):
    sizes, rows = vc.ShardSizes.balanced(CLASSES, ranks), ROWS[:ranks]
    first, end = tp.vocab_range(sizes, rank)
    weight = drawn(device, CLASSES, 4)[first:end].clone()
    ids, how = numbers(device, CLASSES, sum(rows)), {"sequence_sizes": rows, "exchange": exchange}
    return differentiated(lambda w: tp.vocab_parallel_embedding(ids, w, sizes, **how), weight)


COUNTED = {"looks": 1, "reason": "the host reads how many distinct rows each rank sends"}


@scenario("tensor_parallel.VocabParallelEmbedding", **COUNTED)
def vocab_parallel_embedding_by_rows(device, rank, ranks):
    return vocab_parallel_embedding(device, rank, ranks, "rows")


@scenario("tensor_parallel.vocab_parallel_embedding", **COUNTED)
def vocab_parallel_embedding_by_rows_with_sequence_shards(device, rank, ranks):
    return vocab_parallel_embedding_with_sequence_shards(device, rank, ranks, "rows")


@scenario("tensor_parallel.FeatureParallelEmbedding", "tensor_parallel.feature_parallel_embedding")
def feature_parallel_embedding(device, rank, ranks):
    torch.manual_seed(0)
    layer = tp.FeatureParallelEmbedding(CLASSES, 5).to(device)
    ids = numbers(device, CLASSES, 6)
    return trained(layer, lambda: layer(ids).square().sum(), sums=False)


@scenario("tensor_parallel.vocab_parallel_cross_entropy")
def vocab_parallel_cross_entropy(device, rank, ranks):
    sizes, target = vc.ShardSizes.balanced(CLASSES, ranks), numbers(device, CLASSES, 6)
    logits = drawn(device, 6, sizes[rank], seed=rank)

    def op(logits):
        how = {"label_smoothing": 0.1, "z_loss": 1e-3, "ignore_index": 3, "reduction": "mean"}
        return tp.vocab_parallel_cross_entropy(logits, target, sizes, **how)

    return differentiated(op, logits)


@scenario("tensor_parallel.linear_cross_entropy")
def linear_cross_entropy(device, rank, ranks):
    sizes, target = vc.ShardSizes.balanced(CLASSES, ranks), numbers(device, CLASSES, 6)
    hidden, weight = drawn(device, 6, 4), drawn(device, sizes[rank], 4, seed=rank)
    classes = drawn(device, CLASSES).square()

    def op(hidden, weight):
        return tp.linear_cross_entropy(hidden, weight, target, sizes, class_weight=classes)

    return differentiated(op, hidden, weight)


@scenario("tensor_parallel.ParallelAttention", "tensor_parallel.attention")
def attention(device, rank, ranks):
    torch.manual_seed(0)
    layer = tp.ParallelAttention(12, num_heads=3, num_kv_heads=3).to(device)
    x = drawn(device, 5, 12, dtype=torch.float32)
    return trained(layer, lambda: layer(x).square().sum(), sums=False)


@scenario("tensor_parallel.attention", "tensor_parallel.split_heads")
def attention_of_split_heads(device, rank, ranks):
    qkv = drawn(device, 7, 40)
    return differentiated(lambda x: tp.attention(*tp.split_heads(x, 5, 2)), qkv)


@scenario("models.GPT", "tensor_parallel.parallelize")
def gpt(device, rank, ranks, exchange=None):
    torch.manual_seed(0)
    model = models.GPT(CLASSES, 12, num_layers=2, num_heads=3).to(device)
    plan = model.tensor_parallel_plan()
    tp.parallelize(model, plan | {"embedding": partial(plan["embedding"], exchange=exchange)})
    text = numbers(device, CLASSES, 9)
    return trained(model, lambda: model.loss(text[:-1], text[1:]), sums=False)


@scenario("models.GPT", "tensor_parallel.parallelize", "tensor_parallel.clip_grad_norm_")
def gpt_with_sequence_shards(device, rank, ranks):
    torch.manual_seed(0)
    model = models.GPT(CLASSES, 12, num_layers=1, num_heads=3, recompute=True).to(device)
    tp.parallelize(model, model.tensor_parallel_plan(ROWS[:ranks]))
    text = numbers(device, CLASSES, sum(ROWS[:ranks]) + 1)

    def loss():
        return model.loss(text[:-1], text[1:])

    def step():
        model.zero_grad()
        value = loss()
        value.backward()
        norm = tp.clip_grad_norm_(model.parameters(), 0.1)
        return [value, norm, *(p.grad for p in model.parameters())]

    return step


@scenario("tensor_parallel.grad_norm", "tensor_parallel.param_is_not_tensor_parallel_duplicate")
def grad_norm(device, rank, ranks):
    torch.manual_seed(0)
    layer = tp.ColumnParallelLinear(4, 7).to(device)
    x = drawn(device, 5, 4, dtype=torch.float32)

    def step():
        layer.zero_grad()
        layer(x).square().sum().backward()
        counted = [tp.param_is_not_tensor_parallel_duplicate(p) for p in layer.parameters()]
        return [tp.grad_norm(layer.parameters()), torch.tensor(counted)]

    return step


@scenario("tensor_parallel.sequence_parallel")
def sequence_parallel(device, rank, ranks):
    norm = tp.sequence_parallel(nn.LayerNorm(4)).double().to(device)
    x = drawn(device, ROWS[rank], 4)
    return trained(norm, lambda: norm(x).square().sum(), sums=False)


@scenario("tensor_parallel.broadcast_data", looks=0)
def broadcast_data(device, rank, ranks):
    data = {"ids": numbers(device, 9, 4), "mask": numbers(device, 2, 4)} if rank == 0 else None

    def step():
        return list(tp.broadcast_data(["ids", "mask"], data, torch.int64).values())

    return step


@scenario("tensor_parallel.checkpoint", "tensor_parallel.CheckpointWithoutOutput")
def checkpoints_of_activations(device, rank, ranks):
    def op(x):
        y = tp.checkpoint(lambda x: vc.all_reduce(x).exp(), x)
        with tp.CheckpointWithoutOutput() as keep:
            z = keep.checkpoint(torch.tanh, y) * y
        return z

    return differentiated(op, drawn(device, 5))


@scenario(
    "tensor_parallel.copy_to_tensor_model_parallel_region",
    "tensor_parallel.reduce_from_tensor_model_parallel_region",
    "tensor_parallel.scatter_to_tensor_model_parallel_region",
    "tensor_parallel.gather_from_tensor_model_parallel_region",
    "tensor_parallel.all_gather_last_dim_from_tensor_parallel_region",
    "tensor_parallel.reduce_scatter_last_dim_to_tensor_parallel_region",
)
def mappings_of_features(device, rank, ranks):
    rows = ROWS[:ranks]

    def op(x):
        y = tp.copy_to_tensor_model_parallel_region(x)
        y = tp.scatter_to_tensor_model_parallel_region(y, rows)
        z = tp.gather_from_tensor_model_parallel_region(y, rows)
        whole = tp.all_gather_last_dim_from_tensor_parallel_region(y, rows)
        part = tp.reduce_scatter_last_dim_to_tensor_parallel_region(whole, rows)
        return [tp.reduce_from_tensor_model_parallel_region(z), part]

    return differentiated(op, drawn(device, 2, sum(rows)))


@scenario(
    "tensor_parallel.scatter_to_sequence_parallel_region",
    "tensor_parallel.gather_from_sequence_parallel_region",
    "tensor_parallel.reduce_scatter_to_sequence_parallel_region",
    "tensor_parallel.all_to_all",
    "tensor_parallel.all_to_all_sp2hp",
    "tensor_parallel.all_to_all_hp2sp",
)
def mappings_of_sequences(device, rank, ranks):
    rows, wide = ROWS[:ranks], (1, 2, 1, 3, 2)[:ranks]

    def op(x):
        own = tp.scatter_to_sequence_parallel_region(x, rows)
        whole = tp.gather_from_sequence_parallel_region(own, sizes=rows)
        part = tp.reduce_scatter_to_sequence_parallel_region(whole, rows)
        heads = tp.all_to_all_sp2hp(part, rows, wide)
        back = tp.all_to_all_hp2sp(heads, rows, wide)
        moved = tp.all_to_all(whole, [rows[rank]] * ranks, rows)
        return [back, moved]

    return differentiated(op, drawn(device, sum(rows), sum(wide)))


@scenario(
    "tensor_parallel.split_tensor_into_1d_equal_chunks",
    "tensor_parallel.gather_split_1d_tensor",
    "tensor_parallel.split_tensor_along_last_dim",
)
def pieces_of_one_dimension(device, rank, ranks):
    x = drawn(device, 2, 3 * ranks)

    def step():
        piece = tp.split_tensor_into_1d_equal_chunks(x)
        parts = tp.split_tensor_along_last_dim(x, [3] * ranks)
        return [tp.gather_split_1d_tensor(piece, x.numel()), *parts]

    return step


# --- Partitioned graphs


def part(device, ranks, data=None):
    """Partition a wild graph, on one of whose ranks there may be no node."""
    data = wild() if data is None else data
    method = split_by("a rank owns nothing" if ranks > 2 else "block", data.num_nodes, ranks)
    return graph.partition(data, method=method).to(device)


def regression(
    device, ranks, make, call=lambda model, g: model(g.x, g.edge_index), data=None, overlap=False
):
    """Return the training step of a network on a partitioned graph."""
    torch.manual_seed(0)
    g = part(device, ranks, data)
    model = graph.distribute(make().double().to(device), g, overlap=overlap)

    def loss():
        out = call(model, g)
        return graph_mean(g, out)

    return trained(model, loss)


def graph_mean(g, out):
    return g.mean(F.mse_loss(out, g.y[:, :1].expand_as(out), reduction="none"))


def add_network(
    name, make, call=lambda model, g: model(g.x, g.edge_index), covers=(), overlap=False, **how
):
    def scenario_of(device, rank, ranks):
        return regression(device, ranks, make, call, overlap=overlap)

    scenario_of.__name__ = name
    names = "graph.partition", "graph.distribute", "graph.PartitionedGraph"
    scenario(*names, *covers, **how)(scenario_of)


def with_edges(model, g):
    return model(g.x, g.edge_index, g.edge_attr)


@scenario("graph.partition", "graph.distribute", "graph.PartitionedGraph")
def gcn_with_edge_weights(device, rank, ranks):
    # PyG keeps the weight of one self loop of a node; on a GPU it is any of them
    data = wild()
    loops = data.edge_index[0] == data.edge_index[1]
    data.edge_attr[loops] = data.x[data.edge_index[0, loops], :3]

    def call(model, g):
        return model(g.x, g.edge_index, g.edge_attr.square().sum(1))

    return regression(device, ranks, lambda: pyg.GCNConv(4, 2), call, data)


add_network("gcn_with_self_loops", lambda: pyg.GCN(4, 6, 2, 2))
add_network("gcn_without_self_loops", lambda: pyg.GCN(4, 6, 2, 2, add_self_loops=False))
add_network("gcn_cached", lambda: pyg.GCN(4, 6, 2, 2, cached=True))
add_network("graph_sage", lambda: pyg.GraphSAGE(4, 6, 2, 2))
add_network("graph_sage_max", lambda: pyg.GraphSAGE(4, 6, 2, 2, aggr="max"))
add_network("gat_with_self_loops", lambda: pyg.GAT(4, 6, 2, 2, heads=2))
add_network("gat_v2_with_edges", lambda: pyg.GATv2Conv(4, 2, edge_dim=3), with_edges)
add_network("gin", lambda: pyg.GIN(4, 6, 2, 2))
add_network("edge_cnn", lambda: pyg.EdgeCNN(4, 6, 2, 2))
add_network("edge_cnn_overlapped", lambda: pyg.EdgeCNN(4, 6, 2, 2), overlap=True)
add_network(
    "res_gated_overlapped",
    lambda: pyg.ResGatedGraphConv(4, 2, edge_dim=3),
    with_edges,
    overlap=True,
)
add_network("edge_cnn_with_batch_norm", lambda: pyg.EdgeCNN(4, 6, 2, 2, norm="batch_norm"))
add_network("sage_of_targets", lambda: pyg.SAGEConv(4, 2, aggr="max", flow="target_to_source"))
add_network("transformer_conv", lambda: pyg.TransformerConv(4, 2))
add_network(
    "pna",
    lambda: pyg.PNAConv(
        4, 2, ["mean", "min", "max", "std"], ["identity", "amplification"], torch.tensor([0, 1, 9])
    ),
)
add_network(
    "mesh_graph_net",
    lambda: models.MeshGraphNet(4, 3, 2, hidden_channels=6, num_blocks=2),
    with_edges,
    ("models.MeshGraphNet",),
)
add_network(
    "graph_transformer",
    lambda: models.GraphTransformer(4, 3, 2, hidden_channels=12, num_blocks=2, num_heads=3),
    with_edges,
    ("models.GraphTransformer",),
)

NORMS = {
    "batch_norm": lambda: pyg.BatchNorm(4),
    "torch_batch_norm": lambda: nn.BatchNorm1d(4),
    "graph_norm": lambda: pyg.GraphNorm(4),
    "layer_norm_of_graphs": lambda: pyg.LayerNorm(4),
    "layer_norm_of_nodes": lambda: nn.LayerNorm(4),
    "pair_norm": lambda: pyg.PairNorm(),
    "instance_norm": lambda: pyg.InstanceNorm(4),
    "mean_subtraction_norm": lambda: pyg.MeanSubtractionNorm(),
    "graph_size_norm": lambda: pyg.GraphSizeNorm(),
    "message_norm": lambda: pyg.MessageNorm(learn_scale=True),
    "diff_group_norm": lambda: pyg.DiffGroupNorm(4, 2),
}


class Normed(nn.Module):
    """A convolution behind a norm of the rows of all ranks."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.conv = norm, pyg.SAGEConv(4, 2)

    def forward(self, x, edge_index):
        y = self.norm(x, x.tanh()) if isinstance(self.norm, pyg.MessageNorm) else self.norm(x)
        return self.conv(y, edge_index)


for _name, _norm in NORMS.items():
    add_network(_name, lambda norm=_norm: Normed(norm()))


@scenario("graph.global_norm")
def norm_made_global(device, rank, ranks):
    g = part(device, ranks)
    norm = nn.BatchNorm1d(4).double().to(device)
    norm.forward = graph.global_norm(norm, g)
    return trained(norm, lambda: graph_mean(g, norm(g.x)))


class Readout(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.pool, self.conv, self.out = pool, pyg.SAGEConv(4, 5), nn.Linear(5, 2)
        self.norm = pyg.GraphNorm(5)

    def forward(self, x, edge_index, batch):
        return self.out(self.pool(self.norm(self.conv(x, edge_index), batch), batch))


def add_pool(name, pool):
    def scenario_of(device, rank, ranks):
        torch.manual_seed(0)
        data = wild()
        data.batch = torch.arange(24) // 9
        g = part(device, ranks, data)
        model = graph.distribute(Readout(pool).double().to(device), g)

        def loss():
            out = model(g.x, g.edge_index, g.batch)
            return graph.replicated(out.square().sum(), g)

        return trained(model, loss)

    scenario_of.__name__ = name
    scenario("graph.replicated", "graph.distribute")(scenario_of)


add_pool("global_add_pool", pyg.global_add_pool)
add_pool("global_mean_pool", pyg.global_mean_pool)
add_pool("global_max_pool", pyg.global_max_pool)


@scenario("graph.PartitionedGraph", "graph.NodeShard")
def sums_over_nodes_with_a_mask(device, rank, ranks):
    g = part(device, ranks)

    def op(x):
        values = x * g.x
        return [g.mean(values, mask=g.train_mask), g.sum(values, mask=g.train_mask), g.mean(values)]

    return differentiated(op, drawn(device, 4))


@scenario("graph.PartitionedGraph", "graph.NodeShard")
def largest_over_nodes(device, rank, ranks):
    g = part(device, ranks)

    def op(x):
        values = (x * g.x).clamp(max=1)  # which several reach
        return [g.max(values), g.max(values, mask=g.train_mask)]

    return differentiated(op, drawn(device, 4))


@scenario("graph.PartitionedGraph", "graph.EdgeShard")
def halo_and_gather(device, rank, ranks):
    g = part(device, ranks)
    x = drawn(device, g.num_owned, 2, seed=rank)

    def op(x):
        return [g.with_halo(x), g.halo(x), g.gather(x)]

    return differentiated(op, x)


@scenario("graph.message_passing", "graph.edge_update")
def message_passing(device, rank, ranks):
    g = part(device, ranks)

    def op(x):
        edges = graph.edge_update(g, lambda x_i, x_j, e: x_i * x_j + e, x, g.edge_attr[:, :1])
        passed = graph.message_passing(g, lambda x_i, x_j: x_i - x_j, x, aggr="mean")
        return [edges, passed]

    return differentiated(op, drawn(device, g.num_owned, 2, seed=rank))


class Neighbours(nn.Module):
    def forward(self, x, row, col):
        return torch.zeros_like(x).index_add(0, col, x[row])


@scenario("graph.exchange_before")
def exchange_before(device, rank, ranks):
    g = part(device, ranks)
    model = nn.Sequential(Neighbours())
    graph.exchange_before(model, g, {"0": ["x"]})
    ends = g.edges.local_ids
    x = drawn(device, g.num_owned, 2, seed=rank)
    return differentiated(lambda x: model[0](x, *ends)[: g.num_owned], x)


@scenario("graph.from_edges")
def graph_from_edges(device, rank, ranks):
    sizes = vc.ShardSizes.balanced(24, ranks)
    edges = wild().edge_index.to(device)
    first, end = sizes.range(rank).start, sizes.range(rank).stop
    if rank != 0:
        edges = edges[:, :0]
    g = graph.from_edges(edges, sizes)
    x = drawn(device, 24, 4)[first:end].clone()
    torch.manual_seed(0)
    model = graph.distribute(pyg.GraphSAGE(4, 6, 2, 2).double().to(device), g)
    return trained(model, lambda: g.mean(model(x, g.edge_index)))


@scenario("graph.transfer", "graph.Transfer", "graph.remap")
def moves_between_partitions(device, rank, ranks):
    data = wild()
    old = graph.partition(data, method="block").to(device)
    new = graph.partition(data, method="random").to(device)
    move = graph.transfer(old, new)
    coarse = graph.from_edges(
        torch.empty(2, 0, dtype=torch.int64, device=device), vc.ShardSizes.balanced(12, ranks)
    )
    parents = new.owned_ids // 2
    remap = graph.remap(coarse, new, parents)
    x, y = drawn(device, old.num_owned, 2), drawn(device, coarse.num_owned, 2, seed=1)
    return differentiated(lambda x, y: [move(x), remap(y)], x, y)


def hetero():
    """Return cells of a grid, and hubs that read and write to them."""
    data = HeteroData()
    cells, hubs = 24, 6
    data["cell"].x, data["hub"].x = drawn("cpu", cells, 4), drawn("cpu", hubs, 3, seed=1)
    data["cell"].y = drawn("cpu", cells, 2, seed=2)
    near = torch.stack([torch.arange(cells), torch.arange(cells) // 4])
    inner = torch.stack([torch.arange(hubs), torch.arange(hubs).roll(1)])
    edges = {("cell", "to", "hub"): near, ("hub", "by", "hub"): inner}
    edges["hub", "to", "cell"] = near.flip(0)
    for number, (kind, ends) in enumerate(edges.items()):
        data[kind].edge_index = ends
        data[kind].edge_attr = drawn("cpu", ends.shape[1], 3, seed=5 + number)
    return data


@scenario("graph.partition", "graph.distribute")
def hetero_conv(device, rank, ranks):
    torch.manual_seed(0)
    data = hetero()
    g = graph.partition(data, method="block").to(device)
    channels = {"cell": 4, "hub": 3}
    conv = pyg.HeteroConv(
        {(a, r, b): pyg.SAGEConv((channels[a], channels[b]), 2) for a, r, b in data.edge_types}
    )
    model = graph.distribute(conv.double().to(device), g)

    def loss():
        out = model(g.x_dict, g.edge_index_dict)
        loss = g["cell"].mean(F.mse_loss(out["cell"], g["cell"].y, reduction="none"))
        return loss + g["hub"].mean(out["hub"].square())  # which uses all parameters

    return trained(model, loss)


@scenario("models.EncodeProcessDecode")
def encode_process_decode(device, rank, ranks):
    torch.manual_seed(0)
    data = hetero()
    names = {"cell": "grid", "hub": "mesh"}
    renamed = HeteroData()
    for kind in data.node_types:
        renamed[names[kind]].x = data[kind].x
    for a, _, b in data.edge_types:
        renamed[names[a], "to", names[b]].edge_index = data[
            a, "by" if a == b else "to", b
        ].edge_index
        renamed[names[a], "to", names[b]].edge_attr = data[a, "by" if a == b else "to", b].edge_attr
    g = graph.partition(renamed, method="block").to(device)
    net = models.EncodeProcessDecode(4, 3, 3, 1, hidden_channels=6, num_blocks=2)
    model = graph.distribute(net.double().to(device), g)
    return trained(
        model,
        lambda: g["grid"].mean(model(g.x_dict, g.edge_index_dict, g.edge_attr_dict).square()),
    )


@scenario("models.Transolver", "models.PointCrossAttention")
def transolver(device, rank, ranks):
    torch.manual_seed(0)
    sizes = ROWS[:ranks]
    kinds = {"hidden_channels": 8, "num_blocks": 2, "num_heads": 2, "num_slices": 3}
    net = models.Transolver(3, 8, **kinds).double().to(device)
    cross = models.PointCrossAttention(8, 2).double().to(device)
    model = nn.ModuleList([net, cross])
    points = drawn(device, sizes[rank], 3)

    def loss():
        out = net(points, sizes)
        return cross(out, out, sizes, sizes).square().sum()

    return trained(model, loss)


def atoms(device, rank, ranks, skin=0.0):
    """Return positions of this rank's atoms, and a periodic cell."""
    per_rank = 12
    spots = drawn("cpu", per_rank * ranks, 3, seed=3).remainder(1.0) * 6.0
    own = spots[rank * per_rank : (rank + 1) * per_rank].to(device)
    return own.contiguous(), (torch.eye(3, dtype=torch.float64) * 6.0).to(device)


@scenario("models.PaiNN", "graph.radius")
def forces_of_painn(device, rank, ranks):
    torch.manual_seed(0)
    pos, cell = atoms(device, rank, ranks)
    g = graph.radius(pos, 2.0, cell=cell, pbc=True)
    net = models.PaiNN(1, cutoff=2.0, hidden_channels=4, num_blocks=1, radial_size=4)
    model = graph.distribute(net.double().to(device), g)
    types = torch.zeros(len(pos), dtype=torch.long, device=device)

    def energy(pos):
        return model(types, pos, g.edge_index, g.edge_attr)

    pos = pos.detach()

    def step():
        where = pos.requires_grad_()
        (force,) = torch.autograd.grad(energy(where).sum(), where, create_graph=True)
        loss = force.square().sum()
        return [force, *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    return step


@scenario("graph.radius", looks=2, reason="ranks agree that no atom has moved beyond the skin")
def radius_while_nothing_is_searched(device, rank, ranks):
    pos, cell = atoms(device, rank, ranks)
    kept = [graph.radius(pos, 2.0, cell=cell, pbc=True, skin=0.5)]

    def step():
        kept[0] = graph.radius(pos, 2.0, cell=cell, pbc=True, skin=0.5, previous=kept[0])
        return [kept[0].edge_attr.sum()]

    return step


@scenario(
    *("graph.radius", "graph.distribute", "models.PaiNN"),
    looks=2,
    reason="ranks agree that no atom has moved beyond the skin",
)
def forces_on_moving_atoms(device, rank, ranks):
    """As varcomm.ase.Calculator calls a model in each step."""
    torch.manual_seed(0)
    pos, cell = atoms(device, rank, ranks)
    how = {"cell": cell, "pbc": True, "skin": 0.5}
    kept = [graph.radius(pos, 2.0, **how)]
    net = models.PaiNN(1, cutoff=2.0, hidden_channels=4, num_blocks=1, radial_size=4)
    net = net.double().to(device)
    types = torch.zeros(len(pos), dtype=torch.long, device=device)

    def step():
        where = (pos + 0.01).requires_grad_()
        kept[0] = g = graph.radius(where, 2.0, previous=kept[0], **how)
        shifts = g.shift.to(cell) @ cell
        energy = graph.distribute(net, g)(types, where, g.edge_index, shifts)
        return [energy, *torch.autograd.grad(energy.sum(), where)]

    return step


@scenario("graph.radius", looks=2, reason="ranks agree that no atom has moved beyond the skin")
def radius_in_a_cell_that_changes(device, rank, ranks):
    pos, cell = atoms(device, rank, ranks)
    how = {"pbc": True, "skin": 0.5, "ids": torch.arange(len(pos), device=device) + rank * len(pos)}
    kept = [graph.radius(pos, 2.0, cell=cell, **how)]
    moves = [drawn(device, len(pos), 3, seed=seed) * 0.02 for seed in range(2)]

    def step():
        stretch = (torch.eye(3, dtype=pos.dtype, device=device) * 1.001).requires_grad_()
        at, vectors = (pos + moves[0]) @ stretch, cell @ stretch
        moves.append(moves.pop(0))
        g = graph.radius(at, 2.0, cell=vectors, previous=kept[0], **how)
        kept[0] = g
        loss = g.edge_attr.square().sum()
        return [g.edge_attr, g.edges.local_ids, g.owned_ids, *torch.autograd.grad(loss, stretch)]

    return step


# --- Set-up, which a program does once or now and then: its looks are not counted

SET_UP = "set-up, not a step"


@scenario("graph.PartitionedGraph", "graph.rebalance", "graph.assign", looks=None, reason=SET_UP)
def graphs_that_change(device, rank, ranks):
    data = wild()
    owner = graph.assign(data, ranks, "block")

    def step():
        g = graph.partition(data, method=owner).to(device)
        moved = g.migrate(torch.full((g.num_owned,), ranks - 1, device=device))
        back = graph.rebalance(moved, torch.ones(moved.num_owned, device=device))
        y = back.with_halo(back.x)
        return [
            moved.x,
            back.x,
            y,
            back.owned_ids,
            back.rows(back.x, torch.arange(3, device=device)),
        ]

    return step


@scenario("graph.knn", "graph.assign_sharded", looks=None, reason=SET_UP)
def neighbours_and_owners_by_position(device, rank, ranks):
    pos, _ = atoms(device, rank, ranks)

    def step():
        near = graph.knn(pos, 3)
        return [near.edge_attr, near.owned_ids, graph.assign_sharded(pos, ranks, "hilbert")]

    return step


@scenario("graph.radius", looks=None, reason="a search, which runs on the CPU")
def radius_with_a_search(device, rank, ranks):
    pos, cell = atoms(device, rank, ranks)
    return lambda: [graph.radius(pos, 2.0, cell=cell, pbc=True).edge_attr.sum()]


@scenario(
    *("checkpoint.save", "checkpoint.load", "checkpoint.full_state_dict", "checkpoint.export"),
    *("checkpoint.load_safetensors", "checkpoint.read"),
    looks=None,
    reason=SET_UP,
)
def checkpoints(device, rank, ranks):
    """Save on all ranks, load into a second layer, and load the exported file into a third."""
    torch.manual_seed(0)
    layers = [tp.ColumnParallelLinear(4, 7).double().to(device) for _ in range(3)]

    def step():
        folders = [tempfile.mkdtemp() if rank == 0 else None]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        checkpoint.save({"layer": layers[0]}, folder / "saved")
        checkpoint.load({"layer": layers[1]}, folder / "saved")
        if rank == 0:
            checkpoint.export(folder / "saved", folder / "model.safetensors", "layer")
        dist.barrier()
        checkpoint.load_safetensors(layers[2], folder, device=device)
        whole = checkpoint.full_state_dict(layers[0])
        read = checkpoint.read(folder / "saved")["layer"]
        dist.barrier()
        if rank == 0:
            shutil.rmtree(folder)
        return [*layers[1].parameters(), *layers[2].parameters(), *whole.values(), read["weight"]]

    return step


@scenario(
    "testing.dot_test", "testing.gradcheck", "testing.gradgradcheck", looks=None, reason=SET_UP
)
def checks_of_a_users_operator(device, rank, ranks):
    x = drawn(device, ROWS[rank], 2).requires_grad_()

    def step():
        op = partial(vc.all_gather_v, sizes=ROWS[:ranks])
        vc.testing.dot_test(op, x)
        vc.testing.gradcheck(op, x)
        vc.testing.gradgradcheck(op, x)
        return [x]

    return step


@scenario("debug", "trace", looks=None, reason="debug() sends a description of each call")
def debug_and_trace(device, rank, ranks):
    x = drawn(device, ROWS[rank], 2)

    def step():
        with vc.debug(), vc.trace() as calls:
            y = vc.all_gather_v(x, ROWS[:ranks])
        return [y, torch.tensor(calls.total.sent)]

    return step


# Public names that no scenario calls, and the reason.
EXCEPTIONS = {
    "varcomm": {
        **dict.fromkeys(
            (
                *("ArgumentError", "CommunicationError", "DisagreementError", "GroupError"),
                *("LaunchError", "MissingPackageError", "VarcommError"),
            ),
            "an error",
        ),
        **dict.fromkeys(("Call", "Trace", "Traffic"), "numbers that trace() returns"),
        "check": "it looks at what sums have carried",
        **dict.fromkeys(("Ranks", "World", "init", "launch"), "they start the ranks"),
        **dict.fromkeys(("CapturedStep", "capture"), "tests/gpu/test_capture.py"),
        "ShardSizes": "ints; its owner() is called by plans",
        "from_dtensor": "torch's DTensor accepts no tensor subclass; tests/sharding, on a GPU",
        "to_dtensor": "torch's DTensor accepts no tensor subclass; tests/sharding, on a GPU",
    },
    "varcomm.data_parallel": {
        "sum_hook": "DistributedDataParallel starts a CUDA stream; benchmarks on a GPU call it",
    },
    "varcomm.graph": {
        **dict.fromkeys(("Mesh", "MeshWriter", "Report", "read_mesh"), "files, on the CPU"),
        **dict.fromkeys(("RowWriter", "Rows"), "files, read into pinned memory"),
        **dict.fromkeys(("LinkNeighborLoader", "NeighborLoader"), "they sample on the CPU"),
        "LoaderReport": "numbers that report() returns",
    },
    "varcomm.tensor_parallel": {
        "RandomStreams": "a GPU has generators of its own; tests/tensor_parallel/test_random.py",
        "ShardSpec": "a description",
        "shard_spec": "a description",
    },
    "varcomm.checkpoint": {
        **dict.fromkeys(("PendingSave", "PerRank", "RowsById"), "what save() takes and returns"),
    },
    "varcomm.sharding": dict.fromkeys(
        ("Box", "ShardSpec", "Sharded", "mark", "shard_spec"), "a description"
    )
    | {
        "from_dtensor": "as varcomm.from_dtensor",
        "to_dtensor": "as varcomm.to_dtensor",
    },
    "varcomm.testing": {
        **dict.fromkeys(("Ranks", "launch"), "they start the ranks"),
        "same_as_one_process": "it starts ranks of its own, on the CPU",
    },
    "varcomm.models": dict.fromkeys(("FNO", "UNet"), "networks for fields of varcomm.grid"),
}
