"""``parallelize``: a model that is there, sharded in place by the names of its layers."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.ops.comparing import Failures
from tests.worlds import on_ranks
from varcomm import ArgumentError
from varcomm.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    parallelize,
    sequence_parallel,
    shard_spec,
    vocab_parallel_cross_entropy,
)

VOCABULARY, WIDTH, HIDDEN = 11, 5, 7


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Tied or not, and with a block that stands at two places."""

    def __init__(self, tied):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        block = Block()
        self.blocks = nn.ModuleList([block, Block(), block])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {"embedding": "embedding", "blocks.*.up": "column", "blocks.*.down": "row", "head": "column"}


def made(tied):
    torch.manual_seed(3)
    return Model(tied).double()


@pytest.mark.parametrize(
    ("ranks", "tied", "in_parts", "dim"),
    [
        (1, False, False, 0),
        (3, True, False, 0),
        (3, False, True, 0),
        (3, False, True, 1),
        pytest.param(2, True, True, 1, marks=pytest.mark.slow),
        pytest.param(2, True, True, 0, marks=pytest.mark.slow),
        pytest.param(5, False, False, 0, marks=pytest.mark.slow),
    ],
)
@on_ranks()
def test_a_step_is_that_of_one_process(rank, ranks, tied, in_parts, dim):
    """A step gives the loss and gradients of one process; `dim` is the sequence's."""
    ids = torch.randint(VOCABULARY, (6, 2), generator=torch.Generator().manual_seed(1))
    ids = ids.T if dim else ids
    one, model = made(tied), made(tied)
    sequence = [6 - 2 * (ranks - 1), *[2] * (ranks - 1)] if in_parts else None
    plan = PLAN | ({"blocks.*.norm": "sequence"} if in_parts else {})
    assert parallelize(model, plan, sequence, sequence_dim=dim) is model
    assert model.blocks[0] is model.blocks[2]
    assert (model.head.weight is model.embedding.weight) == tied
    expected = functional.cross_entropy(one(ids).flatten(0, 1), ids.roll(1, 0).flatten())
    loss = vocab_parallel_cross_entropy(model(ids), ids.roll(1, 0), reduction="mean")
    loss.backward()
    expected.backward()
    failures, pairs = Failures(), dict(one.named_parameters())
    with failures.named("loss"):
        torch.testing.assert_close(loss, expected)
        assert list(model.state_dict()) == list(one.state_dict())
    for name, parameter in model.named_parameters():
        spec, whole = shard_spec(parameter), pairs[name].grad
        with failures.named(name):
            own = whole if spec is None else spec.shard(whole)
            torch.testing.assert_close(parameter.grad, own, rtol=1e-9, atol=1e-9)
    return failures


@on_ranks(2)
def test_heads_stay_whole(rank):
    """Names of attention decide: a module with head_dim, whose projections keep whole heads."""
    torch.manual_seed(0)
    model = nn.Module()
    model.head_dim, model.q_proj, model.o_proj = 4, nn.Linear(4, 12), nn.Linear(12, 4)
    with pytest.raises(ArgumentError, match="cuts through heads of 4"):
        parallelize(model, {"o_proj": partial(RowParallelLinear.from_linear, sizes=[7, 5])})
    with pytest.raises(ArgumentError, match="multiples of multiple_of"):
        ColumnParallelLinear(4, 12, sizes=[7, 5], multiple_of=4)
    whole = {"multiple_of": 4}
    parallelize(model, {"q_proj": partial(ColumnParallelLinear.from_linear, **whole)})
    assert len(model.q_proj.weight) == [8, 4][rank]


@on_ranks(2)
def test_a_plan_of_every_second_layer(rank):
    """A layer that is left out of a plan refuses a part of its inputs, and can be sharded later."""
    one, model = made(False), made(False)
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    parallelize(model, {"blocks.*.up": "column"})
    with pytest.raises(ArgumentError, match=r"'blocks\.0\.down' is not sharded.*'row' to the plan"):
        model.blocks[0](x)
    parallelize(model, {"blocks.*.down": "row"})
    torch.testing.assert_close(model.blocks[0](x), one.blocks[0](x))
    with pytest.raises(ArgumentError, match="input_is_parallel=False"):
        model.blocks[0].down(torch.ones(2, HIDDEN, dtype=torch.float64))


def halves(layer):
    """A caller's row-parallel layer, made of the layer itself."""
    layer.forward = lambda x: x.sum(-1, keepdim=True)
    return layer


@on_ranks(2)
def test_a_layer_that_a_later_plan_changes_in_place(rank):
    """A layer that a later plan changes in place accepts the part that it refused before."""
    model, x = made(False).blocks[0], torch.ones(2, WIDTH, dtype=torch.float64)
    parallelize(model, {"up": "column"})
    parallelize(model, {"norm": lambda layer: layer})  # whose check of `down` is not a second one
    with pytest.raises(ArgumentError, match="'down' is not sharded"):
        model(x)
    parallelize(model, {"down": halves})
    assert model(x).shape == x.shape


@on_ranks(2)
def test_nothing_is_changed_where_a_later_one_is_refused(rank):
    model = nn.Sequential(nn.LayerNorm(4), sequence_parallel(nn.LayerNorm(4)))
    with pytest.raises(ArgumentError, match="summed already"):
        parallelize(model, {"0": "sequence", "1": "sequence"})
    assert type(model[0]) is nn.LayerNorm


def reset(module):
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@on_ranks(3)
def test_parameters_drawn_again_are_those_of_one_process(rank, dtype):
    """Blocks, biases, a padding id, an empty shard; and the numbers drawn afterwards."""
    fused = partial(ColumnParallelLinear.from_linear, sizes=[[3, 0, 2], [1, 1, 0]])
    plan = PLAN | {"blocks.0.up": fused, "blocks.0.down": fused, "blocks.1.up": "column"}
    plan |= {"blocks.1.down": "row"}
    plan = {name: how for name, how in plan.items() if "*" not in name}
    one = made(False).to(dtype)
    one.embedding = nn.Embedding(VOCABULARY, WIDTH, 10, dtype=dtype)
    one.blocks[0].up, one.blocks[0].down = nn.Linear(3, 7).to(dtype), nn.Linear(3, 7).to(dtype)
    model = parallelize(copy.deepcopy(one), plan)
    for other_seed in (0, rank):  # that of the first rank counts
        torch.manual_seed(5)
        one.apply(reset)
        expected = torch.rand(3)
        torch.manual_seed(5 + other_seed)
        model.apply(reset)
        whole = dict(one.named_parameters())
        for name, parameter in model.named_parameters():
            spec = shard_spec(parameter)
            own = whole[name] if spec is None else spec.shard(whole[name])
            assert torch.equal(parameter, own), name
        if not other_seed:
            assert torch.equal(torch.rand(3), expected)


@on_ranks(3)
def test_encoders_of_torch_call_their_layers_in_eval(rank):
    """Their fused kernels would read this rank's weights and leave out the sum over ranks."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 5, 0.0, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = model(x), model(x, src_key_padding_mask=padding)
        parallelize(model, {"*.linear1": "column", "*.linear2": "row"})
        torch.testing.assert_close(model(x), expected[0])
        rows = ~padding
        padded = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(padded[rows], expected[1][rows])


@on_ranks(3)
def test_an_optimizer_of_the_layers_before(rank):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 7), nn.Linear(7, 4)
    model = nn.Sequential(first, second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallelize(model, {"0": "column", "1": "row"})
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ArgumentError, match="Make the optimizer after parallelize"):
        optimizer.step()
    second(first(torch.ones(2, 4))).sum().backward()  # the old layers are trained on their own
    optimizer.step()


@on_ranks(3)
def test_fused_blocks_of_a_glu(rank):
    """Cut as one block, each rank would multiply features that do not belong together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 14), nn.GLU(), nn.Linear(7, 4))
    x, sizes = torch.randn(2, 4), [3, 0, 4]
    expected = model(x)
    with pytest.raises(ArgumentError, match="fused blocks"):
        parallelize(model, {"0": "column", "2": "row"})
    halves = partial(ColumnParallelLinear.from_linear, sizes=[sizes, sizes])
    rows = partial(RowParallelLinear.from_linear, sizes=sizes)
    parallelize(model, {"0": halves, "2": rows})
    torch.testing.assert_close(model(x), expected)
