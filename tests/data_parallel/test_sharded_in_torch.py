"""A ShardedGradients as an optimizer of torch: GradScaler, clips between backwards, refusals."""

import copy
import pickle
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import varcomm
from tests.data_parallel.cases import (
    assert_equal,
    close,
    plain,
    seeded,
    square,
    twins,
)
from tests.worlds import on_ranks
from varcomm import ArgumentError, DisagreementError
from varcomm.data_parallel import ShardedGradients

SOME = (3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5)))


@on_ranks(*SOME)
def test_a_grad_scaler_skips_steps_on_all_ranks(rank, ranks):
    """The last rank alone has a gradient that is not finite, in one step."""
    model, twin = twins(lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)))
    own = ShardedGradients(model, lambda groups: torch.optim.Adam(groups, lr=0.1), reduce="sum")
    one = torch.optim.Adam(twin.parameters(), lr=0.1)
    how = {"init_scale": 2.0**120, "backoff_factor": 2.0**-112, "growth_interval": 2}
    scalers = [torch.amp.GradScaler("cpu", **how) for _ in range(2)]
    for step in range(6):
        torch.manual_seed(step)
        rows = [torch.randn(2, 3) for _ in range(ranks)]
        rows[-1][0, 0] = torch.inf if step == 3 else 1.0
        if rank or ranks == 1:
            scalers[0].scale(square(model(rows[rank]))).backward()
        scalers[0].scale(torch.zeros(()))  # which sets it up, on a rank without rows
        for each in rows[ranks > 1 :]:
            scalers[1].scale(square(twin(each))).backward()
        if step % 2:
            for scaler, optimizer in zip(scalers, (own, one), strict=True):
                scaler.unscale_(optimizer)
            norm = clip_grad_norm_(twin.parameters(), 1.0)
            torch.testing.assert_close(own.clip_grad_norm_(1.0).float(), norm, equal_nan=True)
        for scaler, optimizer in zip(scalers, (own, one), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_equal(model, twin, 1e-4)
    assert scalers[0].get_scale() < 2.0**20


def is_refused(call, words, kind=ArgumentError):
    with pytest.raises(kind, match=words):
        call()


@on_ranks(2)
def test_other_uses_of_gradients_are_refused(rank, ranks):
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    own = ShardedGradients(model, plain, reduce="sum")
    model(torch.ones(1, 3)).sum().backward()
    grad = model[0].weight.grad
    assert (grad.shape, grad.dtype) == ((2, 3), torch.float32)
    assert "'0.weight'" in repr(grad)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    for call in (
        other.step,
        lambda: grad + 1,
        lambda: grad.mul_(2),
        grad.norm,
        lambda: torch._foreach_mul_([grad], 2.0),
        lambda: clip_grad_norm_(model[0].parameters(), 1.0),
        lambda: clip_grad_value_([model[0].weight], 1.0),
        lambda: torch.isfinite(grad).all(),
        lambda: torch.stack([grad]),
        lambda: model.zero_grad(set_to_none=False),
        lambda: copy.deepcopy(grad),
        lambda: pickle.dumps(grad),
    ):
        is_refused(call, r"^ShardedGradients: the gradient of parameter '0\.weight' is summed over")
    is_refused(lambda: varcomm.tensor_parallel.grad_norm(model), "Call clip_grad_norm_ of its Sh")
    is_refused(lambda: varcomm.data_parallel.sum_gradients(model), "belongs to a ShardedGradients")
    ddp = DistributedDataParallel(model)
    is_refused(lambda: ddp(torch.ones(1, 3)).sum().backward(), "Use no DistributedDataParallel")
    own.close()


@on_ranks(2)
def test_other_uses_of_the_optimizer_are_refused(rank, ranks):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    hooks = [f"register_{kind}_hook" for kind in ("state_dict_pre", "load_state_dict_post")]
    for call, words in (
        (lambda: own.add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "be added"),
        (lambda: copy.deepcopy(own), "cannot be copied"),
        *((lambda name=name: getattr(own, name)(print), "are not called") for name in hooks),
    ):
        is_refused(call, f"^ShardedGradients.*{words}")
    is_refused(lambda: own.param_groups[0].update(params=[]), "a group keeps its parameters")
    seen = []
    own.register_step_post_hook(lambda *_: seen.append(1))
    own.step()
    assert seen == [1]
    own.param_groups[0]["params"].pop()
    is_refused(own.step, "has other groups or tensors")


@on_ranks(2)
def test_gradients_that_are_set_to_none_or_replaced(rank, ranks):
    """It drops a sum, or would be added to it: an error before the next step, and not after one."""
    model = seeded(lambda: nn.Linear(2, 2))
    own = ShardedGradients(model, plain)

    def backward():
        model(torch.ones(1, 2)).sum().backward()

    words = (
        "refused on rank {} of 2.*: the grad of parameter 'bias' was set to None.* or to another"
    )
    for value, culprits, again in product((None, torch.zeros(2)), ((1,), (0, 1)), (False, True)):
        backward()
        if rank in culprits:
            model.bias.grad = value
        if again:
            backward()
        is_refused(own.step, words.format(culprits[0]))
        own.zero_grad()
    model.zero_grad()
    backward()
    own.step()
    own.zero_grad()
    model.bias.grad = torch.full((2,), rank + 1.0)  # not computed by backward
    bias = model.bias.detach().clone()
    own.step()
    assert torch.allclose(model.bias, bias - 0.01 * 1.5)
    own.zero_grad()
    backward()
    own.step()
    own.zero_grad()
    model.zero_grad()
    model.bias.requires_grad_(False)
    backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    scaler.scale(torch.ones(()))
    is_refused(lambda: scaler.unscale_(own), "parameter 'bias' was replaced")


@on_ranks(2)
def test_ranks_that_use_gradients_differently(rank, ranks):
    model = nn.Linear(2, 2)
    own = ShardedGradients(model, plain)
    model(torch.ones(1, 2)).sum().backward()
    for other in (partial(own.clip_grad_value_, 1.0), own.zero_grad):
        is_refused(own.step if rank else other, "ranks disagree on operation", DisagreementError)
    own.reduce()
    assert all(piece.value.grad.eq(1).all() for piece in own.pieces.values())
    different = partial(own.clip_grad_value_, rank + 1.0)
    is_refused(different, "ranks disagree on clip_value", DisagreementError)
    is_refused(lambda: own.clip_grad_value_(-rank), "refused on rank 1 of 2: .*must not be neg")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (rank + 1))
    scaler.scale(torch.ones(()))
    is_refused(lambda: scaler.unscale_(own), "ranks disagree on the scale", DisagreementError)


@on_ranks(2)
def test_a_backward_of_one_rank_between_clips(rank, ranks):
    """Each clip counts all gradients before it."""
    model, twin = twins(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double())
    own = ShardedGradients(model, plain, reduce="sum")
    x = torch.ones(1, 2).double()
    for backwards in ((0, 1), (0,), ()):
        for r in backwards:
            square(twin(x * (r + 1))).backward()
        if rank in backwards:
            square(model(x * (rank + 1))).backward()
        close(own.clip_grad_norm_(0.5), clip_grad_norm_(twin.parameters(), 0.5), 1e-10)
    own.step()
    plain(twin.parameters()).step()
    assert_equal(model, twin, 1e-10)


@on_ranks(2)
def test_sums_inside_accumulate_are_refused(rank, ranks):
    """Also if one rank alone is inside; zero_grad() drops what has been accumulated."""
    model = seeded(lambda: nn.Linear(2, 2))
    own = ShardedGradients(model, plain, reduce="sum")
    for inside in ((0, 1), (1,)):
        with own.accumulate() if rank in inside else nullcontext():
            model(torch.ones(1, 2)).sum().backward()
            clip = partial(own.clip_grad_norm_, 1.0)
            for call in (own.reduce, own.step, clip, partial(own.clip_grad_value_, 1.0)):
                is_refused(call, f"refused on rank {inside[0]} of 2.*inside accumulate")
            own.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
        own.reduce()
        assert all(piece.value.grad.eq(2).all() for piece in own.pieces.values())
        own.zero_grad()


@on_ranks(2)
def test_gradients_of_several_dtypes_are_unscaled(rank, ranks):
    """A GradScaler unscales the gradients of each dtype by themselves."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
    own = ShardedGradients(model, plain, reduce="sum", sizes=[12, 0])
    for scale in (2.0, 4.0):
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        loss = sum(module(torch.ones(1, 2, dtype=module.weight.dtype)).sum() for module in model)
        scaler.scale(loss).backward()
        scaler.unscale_(own)
        assert all(piece.value.grad.eq(2).all() for piece in own.pieces.values())
        own.zero_grad()


@on_ranks(2)
def test_a_closed_optimizer_leaves_no_gradients(rank, ranks):
    model = seeded(lambda: nn.Linear(2, 2))
    own = ShardedGradients(model, plain)
    model(torch.ones(1, 2)).sum().backward()
    with warnings.catch_warnings():
        own.close()
    assert all(parameter.grad is None for parameter in model.parameters())
    del own
    other = ShardedGradients(model, plain)
    del other
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.slow
@on_ranks(2)
def test_compiled_models(rank, ranks):
    """Compiled before and after: gradients are no part of what is compiled."""
    model, twin = twins(lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double())
    before = torch.compile(model, backend="aot_eager", fullgraph=True)
    own, one = ShardedGradients(model, plain, reduce="sum"), plain(twin.parameters())
    after = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 3, dtype=torch.float64)
    for _ in range(2):
        for module in (before, after):
            square(module(x * (rank + 1))).backward()
            sum(square(twin(x * (r + 1))) for r in range(2)).backward()
        own.clip_grad_norm_(0.5)
        clip_grad_norm_(twin.parameters(), 0.5)
        for optimizer in (own, one):
            optimizer.step()
            optimizer.zero_grad()
    assert_equal(model, twin, 1e-12)


def muon(groups):
    return torch.optim.Muon(groups, lr=0.02)


@on_ranks(2)
def test_muon_of_pieces_names_the_option(rank, ranks):
    words = 'optimizer_factory: Muon.* Pass sizes="whole-parameters"'
    is_refused(lambda: ShardedGradients(nn.Linear(2, 2, bias=False), muon), words)
