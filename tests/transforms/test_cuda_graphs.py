"""Collectives and a training step captured in a CUDA graph, one rank a GPU."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg

import varcomm
from tests.graph.graphs import split_by, wild
from varcomm.graph import distribute, partition

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 1, reason="needs a GPU")


def captured(rank):
    """Capture a step, change its input, run it again."""
    sizes = [2 + other for other in range(GPUS)]
    device = torch.device("cuda", rank)
    x = torch.ones(sizes[rank], 3, device=device)

    def step():
        return varcomm.all_reduce(varcomm.all_gather_v(x * 2, sizes))

    graph, y = recorded(step)
    x.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    return y.cpu()


def recorded(step, before=1):
    """Run a step on a side stream, which makes communicators and plans, and capture the next."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(before):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, in a thread of its own
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = step()
    return graph, out


NETWORKS = {
    "GCN": lambda: pyg.GCN(4, 6, 2, 2, add_self_loops=False),
    "GAT": lambda: pyg.GAT(4, 6, 2, 2, add_self_loops=False),
    "Transformer": lambda: pyg.TransformerConv(4, 2),
}


def trained(rank):
    """Train by replays beside a twin that trains step by step, on the same values of nodes."""
    device = torch.device("cuda", rank)
    method = split_by("a rank owns nothing" if GPUS > 1 else "block", 24, GPUS)
    graph, found = partition(wild(), method=method).to(device), {}
    for name, make in NETWORKS.items():
        torch.manual_seed(0)
        models = [distribute(make().double().to(device), graph)]
        models.append(distribute(copy.deepcopy(models[0]), graph))
        x = graph.x.clone()

        def stepper(model, x=x):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

            def step():
                out = model(x, graph.edge_index)
                loss = graph.mean(F.mse_loss(out, graph.y, reduction="none"))
                optimizer.zero_grad()
                loss.backward()
                for parameter in model.parameters():  # sum_gradients looks which ranks have one
                    parameter.grad = varcomm.all_reduce(parameter.grad)
                optimizer.step()
                return loss.detach()

            return step

        replayed, plain = map(stepper, models)
        captured_step, loss = recorded(replayed, before=3)
        for turn in range(3 + 4):
            if turn >= 3:
                x.copy_(graph.x * (1 + turn / 10))
                captured_step.replay()
            want = plain()
        torch.cuda.synchronize()
        torch.testing.assert_close(loss, want, rtol=1e-10, atol=1e-12)
        pairs = zip(*(model.parameters() for model in models), strict=True)
        found[name] = all(torch.allclose(a, b, rtol=1e-8, atol=1e-10) for a, b in pairs)
    return found


def test_a_captured_training_step():
    with varcomm.Ranks(GPUS, timeout=200, backend=None) as ranks:
        assert ranks.run(trained) == [dict.fromkeys(NETWORKS, True)] * GPUS


def test_a_captured_step_runs_again():
    with varcomm.Ranks(GPUS, timeout=100, backend=None) as ranks:
        for y in ranks.run(captured):
            rows = sum(2 + other for other in range(GPUS))
            assert torch.equal(y, torch.full((rows, 3), 6.0 * GPUS))
