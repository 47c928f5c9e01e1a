"""Compiled tensor-parallel layers in use: other sizes, overlap, bytes, autocast, debugging."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import Unsupported

import varcomm
from tests.tensor_parallel.compiling import Compiled, leaf
from tests.tensor_parallel.twins import drawn
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm import tensor_parallel as tp
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RandomStreams,
    RowParallelLinear,
    VocabParallelEmbedding,
    linear_cross_entropy,
    sequence_parallel,
)

HIDDEN, VOCABULARY = 7, 17


class Block(nn.Module):
    """What a transformer does with ids, for sequences of any length, sharded or not."""

    def __init__(self, in_parts=False, dtype=torch.float64):
        super().__init__()
        self.in_parts = in_parts
        self.embedding = VocabParallelEmbedding(VOCABULARY, HIDDEN, dtype=dtype)
        norm = nn.RMSNorm(HIDDEN, eps=1e-6, dtype=dtype)
        self.norm = sequence_parallel(norm) if in_parts else norm
        self.attention = ParallelAttention(HIDDEN, 7, dtype=dtype)
        self.up = ColumnParallelLinear(HIDDEN, 11, dtype=dtype)
        self.down = RowParallelLinear(11, HIDDEN, dtype=dtype)

    def forward(self, ids, targets):
        ranks = self.up.group.size
        parts = {}
        if self.in_parts:
            each = [len(ids) // ranks] * (ranks - 1)
            parts = {"sequence_sizes": [*each, len(ids) - sum(each)]}
        x = self.embedding(ids, **parts)
        x = x + self.attention(self.norm(x), **parts)
        x = x + self.down(torch.relu(self.up(x, **parts)), **parts)
        sizes = self.embedding.sizes
        return linear_cross_entropy(x, self.embedding.weight, targets, sizes, **parts).mean()

    def gradients(self, loss):
        return torch.autograd.grad(loss, list(self.parameters()))


def text(length, batch=2):
    generator = torch.Generator().manual_seed(length)
    ids = torch.randint(VOCABULARY, (length + 1, batch), generator=generator)
    return ids[:-1], ids[1:]


@pytest.mark.slow
@pytest.mark.parametrize("in_parts", [False, True])
@on_ranks(2)
def test_other_sizes_need_no_other_graph(rank, in_parts):
    torch.manual_seed(0)
    block = Block(in_parts)
    compiled, graphs = Compiled(block, dynamic=True), []
    for length, batch in [(5, 3), (6, 2), (9, 4)]:
        given = text(length, batch)
        loss, expected = compiled(*given), block(*given)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(
            block.gradients(loss), block.gradients(expected), rtol=1e-12, atol=1e-12
        )
        graphs.append(compiled.graphs)  # more than one where the compiler has started anew
    assert graphs[0] > 0
    assert graphs[-1] - graphs[0] == 0


def differences(expected, got, parameters):
    """Largest differences of losses and gradients, as parts of the largest number in each."""
    asked = list(parameters)
    pairs = [(loss.detach(), *torch.autograd.grad(loss, asked)) for loss in (got, expected)]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*pairs, strict=True))


@pytest.mark.slow
@on_ranks(2, timeout=300)
def test_inductor_keeps_the_order_of_calls(rank):
    """It fuses what is between, and rounds narrow floats once where torch does twice."""
    torch.manual_seed(0)
    block, given = Block(in_parts=True), text(5)
    compiled, names = Compiled(block, "inductor"), [None] * 2
    with varcomm.trace() as calls:
        block.gradients(compiled(*given))
    dist.all_gather_object(names, [call.name for call in calls])
    assert names[0] == names[1]
    assert len(calls) > 10
    assert differences(block(*given), compiled(*given), block.parameters()) < 1e-12
    layers = ColumnParallelLinear(HIDDEN, 11), nn.Tanh(), RowParallelLinear(11, 3)
    mlp, x = nn.Sequential(*layers).bfloat16(), drawn(0, 5, HIDDEN, dtype=torch.bfloat16)
    rounded = Compiled(mlp, "inductor")(x).sin().sum()
    assert differences(mlp(x).sin().sum(), rounded, mlp.parameters()) < 0.05


@on_ranks(2)
def test_wrong_ids_and_targets_are_found_when_the_graph_runs(rank):
    torch.manual_seed(0)
    block, (ids, targets) = Block(), text(5)
    compiled = Compiled(block)
    for given, words in (
        ((ids + VOCABULARY, targets), r"parallel_embedding.*out of range for 17 embeddings"),
        ((ids, targets - VOCABULARY), r"target\[0, 0\] is -\d+, which is not a class"),
    ):
        with pytest.raises(ArgumentError, match=words):
            compiled(*given)
    assert compiled.graphs == 1
    loss = compiled(ids, targets).detach()[None]
    assert varcomm.all_gather_v(loss, [1, 1]).unique().numel() == 1


def in_stream(x, streams):
    with streams.fork("sharded"):
        return torch.dropout(x, 0.5, True)


def without_output(x):
    with tp.CheckpointWithoutOutput() as keep:
        return keep.checkpoint(torch.sin, x) * x


@pytest.mark.slow
@on_ranks(2)
def test_what_breaks_a_graph_says_why(rank):
    """Why each cannot be in one graph; it is right in several."""
    x, streams = leaf(drawn(0, 2, 3)), RandomStreams(7)
    for fn, reason in (
        (lambda: tp.gather_from_tensor_model_parallel_region(x * 2), "pass sizes"),
        (lambda: tp.all_to_all(x * 2), "output_split_sizes"),
        (lambda: in_stream(x * 2, streams), "compile inside of its block"),
        (lambda: tp.checkpoint(torch.sin, x * 2), "compile inside of it"),
        (lambda: without_output(x * 2), "compile inside of it"),
    ):
        with pytest.raises(Unsupported, match=rf"\(reason: .*{reason}"):
            Compiled(fn)()
        torch._dynamo.reset()
        states = streams.state_dict()
        broken = torch.compile(fn, backend="aot_eager")()
        streams.load_state_dict(states)
        torch.testing.assert_close(broken, fn(), rtol=1e-12, atol=1e-12)
