"""Meshes of ranks in three dimensions, and the samples of each rank."""

import argparse
import math
from collections.abc import Sequence
from itertools import product

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import varcomm as vc

DIMENSIONS = ("data", "graph", "tensor")


def new_mesh(sizes: Sequence[int]) -> DeviceMesh:
    """Return the mesh of all ranks; ``mesh["graph"]`` is this rank's group along that dimension."""
    return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=DIMENSIONS)


def own(samples: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Return this rank's samples along the first dimension of the mesh."""
    replicas = mesh["data"]
    shares = vc.ShardSizes.balanced(len(samples), replicas.size())
    return samples.split(shares)[replicas.get_local_rank()]


def sizes_of(text: str) -> tuple[int, ...]:
    """Return the sizes of a mesh written as 1x2x2."""
    sizes = tuple(int(size) if size.isdecimal() else 0 for size in text.split("x"))
    if len(sizes) != 3 or 0 in sizes:
        raise argparse.ArgumentTypeError(
            f"need data x graph x tensor ranks, such as 1x2x2, got {text!r}"
        )
    return sizes


def compact(ranks: int) -> tuple[int, ...]:
    """Return three sizes with this product, as equal as possible."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    found = (sizes for sizes in product(divisors, repeat=3) if math.prod(sizes) == ranks)
    return min(found, key=lambda sizes: (max(sizes), sizes))


def named(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
