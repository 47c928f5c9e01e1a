"""Training steps in CUDA graphs: replays equal further steps, and wrong use is an error."""

import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch

import varcomm as vc
from tests.gpu.graph_recorder import cuda_graphs
from tests.gpu.pretended import plain, pretended
from tests.gpu.scenarios import SCENARIOS
from tests.gpu.test_scenarios import tiers
from tests.transport.strict_nccl import strict_nccl


@contextmanager
def on_gpu():
    with strict_nccl(["cuda"]), pretended() as device, cuda_graphs() as log:
        yield device, log


# AdamW counts its steps on the CPU without ``capturable=True``, which needs a GPU.
COUNTS_ON_CPU = ("sharded_gradients_clipped", "sharded_gradients_clipped_by_value")
CAPTURED = [k for k, v in SCENARIOS.items() if v.looks == 0 and k not in COUNTS_ON_CPU]


def replayed(rank, ranks, name):
    """Compare replays after two steps with further steps on the CPU."""
    on_cpu = SCENARIOS[name].make(torch.device("cpu"), rank, ranks)
    wanted = [[x if x is None else x.detach().clone() for x in on_cpu()] for _ in range(4)]
    with on_gpu() as (device, _):
        captured = vc.capture(SCENARIOS[name].make(device, rank, ranks), warmup=2)
        for want in wanted[2:]:
            for value, expected in zip(captured.replay(), want, strict=True):
                assert (value is None) == (expected is None)
                if value is not None and value.device == device:
                    torch.testing.assert_close(plain(value), expected)


@pytest.mark.parametrize("name", tiers(CAPTURED))
def test_replays_equal_steps(worlds, name):
    worlds.run(2, replayed, 2, name, timeout=60)


def order_of(rank):
    with on_gpu() as (device, log):
        x = torch.ones(2, device=device)

        def step():
            log.append("step")
            return vc.all_reduce(x)

        captured = vc.capture(step, warmup=2)
        x.fill_(3)
        total = plain(captured.replay()).tolist()
        captured.reset()
    return log, total, captured.outputs is captured.replay()


def test_order(worlds):
    log = ["side waits for current", "step", "step", "begin on side, thread_local", "step", "end"]
    log += ["current waits for side", "reset"]
    assert worlds.run(2, order_of) == [(log, [6.0, 6.0], True)] * 2


def on_the_cpu(x):
    return vc.all_reduce(x) + vc.all_reduce(torch.ones(2)).sum()


def refused(rank, step, **how):
    """Return the error and the names of streams: the caller's stream is current again."""
    with on_gpu() as (device, _):
        x = torch.ones(2, device=device)
        with pytest.raises(vc.VarcommError) as caught:
            vc.capture(lambda: step(x), **how)
        return caught.value, torch.cuda.current_stream().name


def looks_on_one_rank(x):
    total = vc.all_reduce(x)
    return total.tolist() if torch.distributed.get_rank() else total


def wrong_on_one_rank(x):
    if torch.distributed.get_rank():
        raise KeyError("no such batch")
    return x * 2


@pytest.mark.parametrize(
    ("step", "kind", "text"),
    [
        (looks_on_one_rank, vc.ArgumentError, "operation not permitted when stream is capturing"),
        (wrong_on_one_rank, vc.ArgumentError, "no such batch"),
        (on_the_cpu, vc.GroupError, "all_reduce moves tensors on the cpu"),
    ],
)
def test_steps_that_no_graph_can_repeat(worlds, step, kind, text):
    for error, stream in worlds.run(2, refused, step):
        assert type(error) is kind
        assert error.on_all_ranks
        assert text in str(error)
        assert stream == "current"


def wrong_arguments(rank):
    errors = []
    for how in ({"warmup": 0}, {"warmup": rank + 1}):
        with cuda_graphs(), pytest.raises(vc.VarcommError) as caught:
            vc.capture(lambda: None, **how)
        errors.append(type(caught.value))
    with cuda_graphs(), vc.debug(), pytest.raises(vc.ArgumentError, match="debug"):
        vc.capture(lambda: None)
    with pytest.raises(vc.GroupError, match="no GPU"):  # without the stand-in
        vc.capture(lambda: None)
    return errors


def test_wrong_arguments(worlds):
    expected = [vc.ArgumentError, vc.DisagreementError]
    assert worlds.run(2, wrong_arguments) == [expected, expected]


def through_memory(rank):
    """Ranks of Gloo share a GPU through the CPU."""
    runs = []

    def step():
        runs.append(None)
        return vc.all_reduce(x) if len(runs) > 1 else x  # pinned memory needs a GPU

    with pretended() as device, cuda_graphs():
        x = torch.ones(2, device=device)
        with pytest.raises(vc.GroupError) as caught:
            vc.capture(step, warmup=1)
    return str(caught.value)


def test_gloo_is_refused(worlds):
    for text in worlds.run(2, through_memory):
        assert "all_reduce moves tensors on the GPU with gloo" in text


AT_EXIT = """
import torch, varcomm as vc
from tests.gpu.test_capture import on_gpu

world = vc.init("gloo")
with on_gpu() as (device, log):
    captured = vc.capture(lambda: torch.ones(2, device=device))
destroy = torch.distributed.destroy_process_group
def destroyed():
    print(log[-1])
    destroy()
torch.distributed.destroy_process_group = destroyed
"""


@pytest.mark.slow
def test_graphs_end_before_the_world():
    """NCCL waits for the end of each graph with its messages, at the exit of a program too."""
    ran = subprocess.run(
        [sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=100, check=True
    )
    assert ran.stdout == "reset\n"
