"""Compiled tensor-parallel layers in use: other sizes, overlap, bytes, autocast, debugging."""

import re

import pytest
import torch
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


def by_inductor(rank):
    torch.manual_seed(0)
    block, given = Block(in_parts=True), text(5)
    compiled, calls = Compiled(block, "inductor"), []
    for fn in (compiled, block):
        with varcomm.trace() as traced:
            block.gradients(fn(*given))
        calls.append([call.name for call in traced])
    wide = differences(block(*given), compiled(*given), block.parameters())
    layers = ColumnParallelLinear(HIDDEN, 11), nn.Tanh(), RowParallelLinear(11, 3)
    mlp, x = nn.Sequential(*layers).bfloat16(), drawn(0, 5, HIDDEN, dtype=torch.bfloat16)
    rounded = Compiled(mlp, "inductor")(x).sin().sum()
    return calls, wide, differences(mlp(x).sin().sum(), rounded, mlp.parameters())


@pytest.mark.slow
def test_inductor_keeps_the_order_of_calls(worlds):
    """It fuses what is between, and rounds narrow floats once where torch does twice."""
    (first, *_), (second, *_) = found = worlds.run(2, by_inductor, timeout=300)
    (compiled, _), (others, _) = first, second
    assert compiled == others
    assert len(compiled) > 10
    for _, wide, rounded in found:
        assert wide < 1e-12
        assert rounded < 0.05


def wrong_values(rank):
    torch.manual_seed(0)
    block, (ids, targets) = Block(), text(5)
    compiled, messages = Compiled(block), []
    for given in [(ids + VOCABULARY, targets), (ids, targets - VOCABULARY)]:
        try:
            compiled(*given)
        except ArgumentError as error:
            messages.append(str(error))
    return messages, compiled.graphs, float(compiled(ids, targets))


def test_wrong_ids_and_targets_are_found_when_the_graph_runs(worlds):
    found = worlds.run(2, wrong_values)
    assert len({loss for *_, loss in found}) == 1
    for messages, count, _ in found:
        ids, targets = messages
        assert re.search(r"parallel_embedding.*out of range for 17 embeddings", ids)
        assert re.search(r"target\[0, 0\] is -\d+, which is not a class", targets)
        assert count == 1


def in_stream(x, streams):
    with streams.fork("sharded"):
        return torch.dropout(x, 0.5, True)


def without_output(x):
    with tp.CheckpointWithoutOutput() as keep:
        return keep.checkpoint(torch.sin, x) * x


def refused(rank):
    """Why each cannot be in one graph; whether it is right in several."""
    x = leaf(drawn(0, 2, 3))
    streams, reasons = RandomStreams(7), {}
    for name, fn in {
        "gather": lambda: tp.gather_from_tensor_model_parallel_region(x * 2),
        "all_to_all": lambda: tp.all_to_all(x * 2),
        "fork": lambda: in_stream(x * 2, streams),
        "checkpoint": lambda: tp.checkpoint(torch.sin, x * 2),
        "without output": lambda: without_output(x * 2),
    }.items():
        try:
            Compiled(fn)()
        except Unsupported as error:
            reasons[name] = re.search(r"\(reason: (.*)\)", str(error)).group(1)
        torch._dynamo.reset()
        states = streams.state_dict()
        broken = torch.compile(fn, backend="aot_eager")()
        streams.load_state_dict(states)
        torch.testing.assert_close(broken, fn(), rtol=1e-12, atol=1e-12)
    return reasons


@pytest.mark.slow
def test_what_breaks_a_graph_says_why(worlds):
    words = {
        "gather": "pass sizes",
        "all_to_all": "output_split_sizes",
        "fork": "compile inside of its block",
        "checkpoint": "compile inside of it",
        "without output": "compile inside of it",
    }
    for reasons in worlds.run(2, refused):
        assert reasons.keys() == words.keys()
        assert all(words[name] in reason for name, reason in reasons.items())
