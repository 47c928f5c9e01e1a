"""Normalisation over the nodes of all ranks: as in one process, through two derivatives."""

import pytest
import torch

import varcomm
from tests.graph.batches import FIRST, assert_same, partitions, whole
from tests.graph.norms import NORMS, applied, buffers, made, names, on
from tests.ops.comparing import Failures, assert_none
from tests.worlds import WORLDS


def check(rank):
    failures, tracked = Failures(), []
    graphs = partitions()[1:]
    for name in NORMS:
        given = whole(*NORMS[name].features)
        # without running statistics both modes are the same
        for training in (True, False) if buffers(made(name)) else (True,):
            alone = made(name, training)
            expected = applied(name, alone, given, torch.sum)
            for graph in graphs:
                module = on(made(name, training), graph)
                got = applied(name, module, given.rows(graph.owned_ids), graph.sum)
                tracked.append(buffers(module))
                with failures.named(name, training):
                    assert_same(got, expected, graph.owned_ids)
                with failures.named(name, training, "running statistics"):
                    torch.testing.assert_close(tracked[-1], buffers(alone), **FIRST)
                    assert list(module.state_dict()) == list(alone.state_dict())
    return failures, tracked


@pytest.mark.parametrize("ranks", WORLDS)
def test_as_in_one_process(worlds, ranks):
    results = worlds.run(ranks, check)
    assert_none([failures for failures, _ in results])
    first, *others = (tracked for _, tracked in results)
    for other in others:
        for one, two in zip(first, other, strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one), "ranks differ"


def check_halo(rank):
    """Copies in the halo are normalised as their originals, and count in no statistic."""
    failures = Failures()
    graphs = partitions()[:1]
    for name in NORMS:
        given = whole(*NORMS[name].features)
        for graph in graphs:
            ids = torch.cat([graph.owned_ids, graph.halo_ids])
            # in one process, a node counts in the loss as often as it is on any rank
            times = varcomm.all_reduce(torch.bincount(ids, minlength=len(given.x)))
            times = times.view(-1, *[1] * (given.x.dim() - 1))
            alone, module = made(name), on(made(name), graph)
            x = given.x.clone().requires_grad_()
            out = alone(x, *NORMS[name].arguments(given))
            (out.sin() * given.weight * times).sum().backward()
            own = given.x[graph.owned_ids].requires_grad_()
            rows = given.rows(ids)
            got = module(graph.with_halo(own), *NORMS[name].arguments(rows))
            (got.sin() * rows.weight).sum().backward()
            varcomm.data_parallel.sum_gradients(module)
            with failures.named(name):
                torch.testing.assert_close(got, out[ids], **FIRST)
                torch.testing.assert_close(own.grad, x.grad[graph.owned_ids], **FIRST)
                torch.testing.assert_close(buffers(module), buffers(alone), **FIRST)
                for mine, theirs in zip(module.parameters(), alone.parameters(), strict=True):
                    torch.testing.assert_close(mine.grad, theirs.grad, **FIRST)
    return failures


def test_rows_of_the_halo(worlds):
    assert_none(worlds.run(3, check_halo))


def check_narrow(rank):
    """Against fp64; dtypes as PyG's, with parameters of fp32 and with narrow ones."""
    failures = Failures()
    graph, _ = partitions()
    for dtype, close in {torch.float32: 1e-5, torch.bfloat16: 0.05}.items():
        for name in NORMS:
            given = whole(*NORMS[name].features)
            given.x = given.x.to(dtype)
            rows, alone = given.rows(graph.owned_ids), made(name)
            expected = alone(given.x.double(), *NORMS[name].arguments(given))[graph.owned_ids]
            # a Linear takes its own dtype alone
            for parameters in (
                (dtype,) if name.startswith("DiffGroupNorm") else (dtype, torch.float32)
            ):
                theirs = made(name).to(parameters)(given.x, *NORMS[name].arguments(given))
                module = on(made(name).to(parameters), graph)
                got = module(rows.x, *NORMS[name].arguments(rows))
                with failures.named(name, dtype, parameters):
                    assert got.dtype == theirs.dtype
                    torch.testing.assert_close(got.double(), expected, rtol=close, atol=close)
                    for key, value in buffers(alone).items():
                        moved = module.get_buffer(key).to(value.dtype)
                        torch.testing.assert_close(moved, value, rtol=close, atol=close)
    return failures


def test_narrow_floats(worlds):
    assert_none(worlds.run(3, check_narrow))


def check_far_from_zero(rank):
    """A mean of squares less the square of the mean would lose all digits of fp32."""
    failures = Failures()
    graph, _ = partitions()
    for name in names("BatchNorm1d", "InstanceNorm", "LayerNorm", "PairNorm"):
        given = whole(*NORMS[name].features)
        given.x = (given.x + 4096).float()
        rows = given.rows(graph.owned_ids)
        expected = made(name)(given.x.double(), *NORMS[name].arguments(given))
        got = on(made(name).float(), graph)(rows.x, *NORMS[name].arguments(rows))
        with failures.named(name):
            torch.testing.assert_close(
                got.double(), expected[graph.owned_ids], rtol=1e-2, atol=1e-2
            )
    return failures


def test_a_large_mean_costs_no_digits(worlds):
    assert_none(worlds.run(3, check_far_from_zero))
