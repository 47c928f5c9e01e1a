"""Collectives captured in a CUDA graph, one rank a GPU."""

import pytest
import torch

import varcomm

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")


def captured(rank):
    """Capture a step, change its input, run it again."""
    sizes = [2 + other for other in range(GPUS)]
    device = torch.device("cuda", rank)
    x = torch.ones(sizes[rank], 3, device=device)

    def step():
        return varcomm.all_reduce(varcomm.all_gather_v(x * 2, sizes))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()  # communicators are made outside of the graph
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    return y.cpu()


def test_a_captured_step_runs_again():
    with varcomm.Ranks(GPUS, timeout=100, backend=None) as ranks:
        for y in ranks.run(captured):
            rows = sum(2 + other for other in range(GPUS))
            assert torch.equal(y, torch.full((rows, 3), 6.0 * GPUS))
