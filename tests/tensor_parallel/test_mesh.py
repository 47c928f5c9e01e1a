"""Tensor parallelism along one dimension of a mesh, replicas along the other: all of it at once."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import varcomm
from tests.ops.comparing import Failures, assert_none
from tests.tensor_parallel.test_parallelize import PLAN, VOCABULARY, made
from varcomm.tensor_parallel import (
    broadcast_data,
    clip_grad_norm_,
    parallelize,
    shard_spec,
    vocab_parallel_cross_entropy,
)

# texts of each replica
BATCHES = (3, 2)
LENGTH = 6


def drawn(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (LENGTH, sum(BATCHES)), generator=generator)


def trained(rank):
    """Three steps with clipped gradients give the losses and weights of one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor, place = mesh["tensor"], mesh["data"].get_local_rank()
    one, model = made(True), made(True)
    parallelize(model, PLAN, group=tensor)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (one, model)]
    failures = Failures()
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        whole = drawn(step)
        first = tensor.get_local_rank() == 0
        own = {"ids": whole.split(BATCHES, 1)[place]} if first else None
        ids = broadcast_data(["ids"], own, torch.int64, tensor)["ids"]
        logits = model(ids)
        losses = vocab_parallel_cross_entropy(logits, ids.roll(1, 0), group=tensor)
        loss = losses.sum() / whole.numel()  # of all replicas
        loss.backward()
        varcomm.data_parallel.sum_gradients(model, mesh["data"])
        norm = clip_grad_norm_(model, 0.1, group=tensor)
        expected = functional.cross_entropy(one(whole).flatten(0, 1), whole.roll(1, 0).flatten())
        expected.backward()
        expected_norm = torch.nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        total = varcomm.all_reduce(loss.detach(), group=mesh["data"])
        with failures.named("step", step):
            torch.testing.assert_close(total, expected.detach(), rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(norm, expected_norm, rtol=1e-10, atol=1e-10)
        for optimizer in optimizers:
            optimizer.step()
    pairs = dict(one.named_parameters())
    for name, parameter in model.named_parameters():
        spec, whole = shard_spec(parameter), pairs[name].detach()
        with failures.named(name):
            part = whole if spec is None else spec.shard(whole)
            torch.testing.assert_close(parameter, part, rtol=1e-9, atol=1e-9)
    return failures


@pytest.mark.slow
def test_training_on_a_mesh(worlds):
    assert_none(worlds.run(4, trained))
