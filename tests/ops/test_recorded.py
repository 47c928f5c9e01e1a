"""What is done with a graph that was recorded: copied, saved, differentiated, run later."""

import copy
import io

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import varcomm
from varcomm import ArgumentError

pytestmark = pytest.mark.slow


class Exchanging(torch.nn.Module):
    def __init__(self, plan):
        super().__init__()
        self.plan = plan

    def forward(self, x):
        return self.plan(x) * 2


def cross_plan(rank, row=0):
    """A plan by which each of two ranks gets a row of the other."""
    indices = [torch.tensor([row] if other != rank else []).long() for other in range(2)]
    return varcomm.ExchangePlan.from_indices(indices, 3)


def copies(rank):
    plan, x = cross_plan(rank), torch.arange(3.0) + 10 * rank
    traced = make_fx(lambda x: plan(x) * 2)(x)
    exported = torch.export.export(Exchanging(plan), (x,), strict=False).module()
    return [copy.deepcopy(each)(x).tolist() for each in (traced, exported)]


def test_copies_of_a_graph_share_its_plan(compiling):
    assert compiling(2, copies) == [[[20.0]] * 2, [[0.0]] * 2]


def saved(rank):
    plan, x = cross_plan(rank), torch.arange(3.0)
    file = io.BytesIO()
    program = torch.export.export(Exchanging(plan), (x,), strict=False)
    torch.export.save(program, file)
    return plan.group.rank, file.getvalue()


def loaded(rank, files):
    plans = [cross_plan(rank, row) for row in (1, 2, 1)]
    program = torch.export.load(io.BytesIO(dict(files)[rank])).module()
    try:
        program(torch.arange(3.0))
    except ArgumentError as error:
        return len(plans), str(error)


def test_a_saved_graph_takes_no_plan_of_another_process(compiling):
    files = compiling(2, saved)
    others = varcomm.launch(loaded, 2, files)
    for rank, (_, told) in enumerate(others):
        assert f"exchange on rank {rank} of 2: the plan of a traced or compiled graph" in told
        assert "or is of another process. Keep it as long as the graph" in told


def forward_mode(rank):
    x, t = torch.arange(3.0), torch.ones(3)

    def fn(x):
        return varcomm.all_gather_v(x * x, [3, 3])

    def dual(call):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, t))).tangent

    told = []
    for call in (
        lambda: torch.func.jvp(make_fx(fn)(x), (x,), (t,)),
        lambda: dual(make_fx(fn)(x)),
        lambda: dual(torch.compile(fn, fullgraph=True, backend="aot_eager")),
    ):
        try:
            told.append(call())
        except ArgumentError as error:
            told.append(str(error))
    return told


def test_forward_mode_of_what_was_recorded_is_refused(compiling):
    for told in compiling(2, forward_mode):
        assert [text.partition(". ")[0] for text in told] == [
            "all_gather_v: a recorded operator has no forward mode"
        ] * 3


def begun_without_gradient(rank, backend):
    def fn(x):
        with torch.no_grad():
            handle = varcomm.all_gather_v(x, [3, 3], async_op=True)
        return handle.wait()

    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
    compiled = torch.compile(fn, fullgraph=True, backend=backend)
    return [torch.autograd.grad(each(x).pow(2).sum(), x)[0].tolist() for each in (fn, compiled)]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_who_waits_asks_for_the_gradient(compiling, backend):
    assert compiling(2, begun_without_gradient, backend) == [[[0.0, 4.0, 8.0]] * 2] * 2


def checkpoints(rank):
    def part(x):
        return varcomm.all_gather_v(x.sin(), [3, 3]).sin()

    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
    inside = torch.compile(part, fullgraph=True, backend="aot_eager")
    (want,) = torch.autograd.grad(part(x).sum(), x)
    (got,) = torch.autograd.grad(checkpoint(inside, x, use_reentrant=False).sum(), x)
    around = torch.compile(
        lambda x: checkpoint(part, x, use_reentrant=False), fullgraph=True, backend="aot_eager"
    )
    try:
        around(x)
    except AssertionError as error:
        return torch.equal(got, want), str(error)


def test_compiled_code_goes_inside_of_a_checkpoint(compiling):
    """The other way round torch fails on an effect that it would compute again."""
    for right, told in compiling(2, checkpoints):
        assert right
        assert "tensors_saved_with_vc_check to be Tensors, got types: [<class 'NoneType'>" in told
