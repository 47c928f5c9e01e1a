"""GPT alone, and sharded: one loss, one training, one text, whatever the number of ranks."""

import copy

import pytest
import torch

from tests.ops.comparing import Failures
from tests.worlds import WORLDS, on_ranks
from varcomm import ArgumentError, DisagreementError, ShardSizes
from varcomm.models import GPT
from varcomm.tensor_parallel import parallelize, shard_spec

VOCABULARY, HIDDEN, HEADS, LENGTH = 131, 40, 5, 7
CLOSE = {"rtol": 1e-9, "atol": 1e-9}


def new_model(seed=0, **options):
    torch.manual_seed(seed)
    sizes = {"num_layers": 2, "num_heads": HEADS} | options
    return GPT(VOCABULARY, HIDDEN, **sizes).double()


def text(*batch, length=LENGTH + 1, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (length, *batch), generator=generator)


# One model


def test_a_place_sees_what_is_before_it():
    model, ids = new_model(), text(2)
    other = ids.clone()
    other[4] = (other[4] + 1) % VOCABULARY
    changed = (model(ids) != model(other)).any(-1).any(-1)
    assert changed.tolist() == [place >= 4 for place in range(LENGTH + 1)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_heads": 3}, "hidden_size 40 must be an even number for each of 3 heads"),
        ({"num_heads": 8}, "hidden_size 40 must be an even number for each of 8 heads"),
        ({"num_kv_heads": 2}, "num_kv_heads 2 a divisor of their number"),
    ],
)
def test_heads_that_do_not_divide(options, text):
    with pytest.raises(ArgumentError, match=text):
        new_model(**options)


# On ranks


def sharded(model, group=None, **sizes):
    """A copy of a model, sharded."""
    copied = copy.deepcopy(model)
    return parallelize(copied, copied.tensor_parallel_plan(group=group, **sizes), group=group)


def own_part(parameter, whole):
    spec = shard_spec(parameter)
    return whole if spec is None else spec.shard(whole)


def steps(model, count, batch=(2,)):
    """Train, and yield the losses."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    ids = text(*batch)
    for _ in range(count):
        optimizer.zero_grad()
        loss = model.loss(ids[:-1], ids[1:])
        loss.backward()
        yield loss.item()
        optimizer.step()


def differences(alone, model, failures, *words, batch=(2,)):
    """Train both for 10 steps; note where losses, first gradients or last weights differ."""
    together, expected = steps(model, 10, batch), steps(alone, 10, batch)
    curves = [[next(together)], [next(expected)]]
    gradients = {
        name: (p.grad.clone(), own_part(p, dict(alone.named_parameters())[name].grad.clone()))
        for name, p in model.named_parameters()
    }
    for curve, rest in zip(curves, (together, expected), strict=True):
        curve.extend(rest)
    weights = dict(alone.named_parameters())
    last = {
        name: (p.detach(), own_part(p, weights[name].detach()))
        for name, p in model.named_parameters()
    }
    with failures.named(*words, "names"):
        assert set(weights) == set(last)
    with failures.named(*words, "losses"):
        torch.testing.assert_close(*map(torch.tensor, curves), **CLOSE)
        assert curves[0][-1] < curves[0][0] - 1
    for what, pairs in (("gradient", gradients), ("weight", last)):
        for name, (got, want) in pairs.items():
            with failures.named(*words, what, name):
                torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize(("tied", "in_parts"), [(True, False), (False, True)])
@on_ranks(*WORLDS)
def test_training_is_that_of_one_process(rank, tied, in_parts):
    failures, model = Failures(), new_model(tied=tied)
    ranks = torch.distributed.get_world_size()
    sequence = ShardSizes.balanced(LENGTH, ranks) if in_parts else None
    differences(model, sharded(model, sequence_sizes=sequence), failures)
    return failures


UNEVEN = {
    "head_sizes": [0, 4, 1],
    "mlp_sizes": [50, 0, 56],
    "vocab_sizes": [100, 31, 0],
}


@pytest.mark.slow
@on_ranks(3)
def test_other_sizes_and_models(rank):
    """Sizes with zeros, grouped queries, recomputation, no batch."""
    failures, in_parts = Failures(), {"sequence_sizes": [5, 2, 0]}
    model = new_model()
    differences(copy.deepcopy(model), sharded(model, **UNEVEN), failures, "uneven")
    differences(
        copy.deepcopy(model), sharded(model, **UNEVEN, **in_parts), failures, "uneven, in parts"
    )
    grouped = new_model(num_heads=10, num_kv_heads=5)
    differences(copy.deepcopy(grouped), sharded(grouped, **UNEVEN), failures, "grouped")
    again = new_model(recompute=True)
    differences(copy.deepcopy(model), sharded(again, **in_parts), failures, "recomputed", batch=())
    return failures


# Texts


def generator(seed=5):
    return torch.Generator().manual_seed(seed)


def test_a_text_begins_as_it_was_given_and_follows_its_draws():
    model, ids = new_model(), text(3, length=2)
    one, other = (model.generate(ids, 9, generator=generator()) for _ in range(2))
    assert one.shape == (11, 3)
    assert torch.equal(one, other)
    assert torch.equal(one[:2], ids)
    assert not torch.equal(one, model.generate(ids, 9, generator=generator(6)))
    assert torch.equal(model.generate(ids, 0), ids)
    likeliest = model.generate(ids, 4, temperature=0)
    for place in range(2, 6):
        assert torch.equal(likeliest[place], model(likeliest[:place])[-1].argmax(-1))


def test_draws_have_the_probabilities_of_the_model():
    model = new_model(num_layers=1)
    ids = text(1, length=1).expand(1, 20_000)
    drawn = model.generate(ids, 1, temperature=0.7, generator=generator())[1]
    shares = (model(ids[:, :1])[0, 0] / 0.7).softmax(0)
    counts = torch.bincount(drawn, minlength=VOCABULARY) / len(drawn)
    assert (counts - shares).abs().max() < 4 * (shares.max() / len(drawn)).sqrt()


def texts(rank, sizes=None):
    model = new_model() if sizes is None else sharded(new_model(), **sizes)
    torch.manual_seed(rank)  # that of the first rank counts
    begin = text(3, length=2)
    return (
        model.generate(begin, 6, generator=generator(5 + rank)),
        model.generate(begin[:, 0], 12, temperature=0.5, context=LENGTH),
        model.generate(begin, 5, temperature=0),
    )


@pytest.mark.parametrize("ranks", WORLDS)
def test_texts_are_those_of_one_process(worlds, ranks):
    expected, several = texts(0), [{"sequence_sizes": None}]
    several.append({"sequence_sizes": ShardSizes.balanced(LENGTH, ranks)})
    if ranks == 3:  # each kind of shards on one rank alone
        sizes = {"head_sizes": [0, 5, 0], "mlp_sizes": [106, 0, 0], "vocab_sizes": [0, 0, 131]}
        several.append({"sequence_sizes": [0, LENGTH, 0], **sizes})
    for sizes in several:
        for answers in worlds.run(ranks, texts, sizes):
            assert all(torch.equal(got, want) for got, want in zip(answers, expected, strict=True))


IDS = text(2, length=3)
WRONG = [
    (IDS[0, 0], 1, {}),
    (IDS, -1, {}),
    *((IDS, 1, {"temperature": wrong}) for wrong in (-0.5, float("nan"))),
    (IDS, 1, {"context": 0}),
]


def test_wrong_texts():
    for ids, count, options in WRONG:
        with pytest.raises(ArgumentError, match="generate"):
            new_model().generate(ids, count, **options)


@on_ranks(2)
def test_wrong_use_on_ranks(rank):
    model = new_model()
    with pytest.raises(ArgumentError, match=r"head_sizes \[2, 2\] sum to 4, but there are 5"):
        model.tensor_parallel_plan(head_sizes=[2, 2] if rank == 1 else None)
    with pytest.raises(DisagreementError, match="ranks disagree on weight"):
        sharded(new_model(seed=rank))
    model = sharded(model, sequence_sizes=[3, 2])
    with pytest.raises(ArgumentError, match=r"7 tokens are more than .* \[3, 2\] sum to, 5"):
        model.generate(IDS, 5)
    with pytest.raises(DisagreementError, match="generate: ranks disagree on steps: rank 0"):
        model.generate(IDS, 2 - rank)
    with pytest.raises(DisagreementError, match="disagree on ids"):
        model.generate(IDS[rank:], 2)
    with torch.no_grad():
        model.norm.weight.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        model.generate(IDS, 1)
