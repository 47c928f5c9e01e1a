"""Compare functions of a tensor whose rows are split over ranks with those of one process.

Prints the table of a page of ``coming_from``: ``python docs/compare_grids.py dtensor``, or
``shardtensor``, which needs ``nvidia-physicsnemo``, or ``varcomm``. Each line says whether output,
gradients and second derivatives equal those of one process, on the first rank.
"""

import contextlib
import sys
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import varcomm as vc

# the dimension that is split, and its lengths on each rank: DTensor allows those of torch.chunk
ROWS, COLUMNS = 2, 3
DIVISIONS = {
    "dtensor": [(ROWS, (8, 8)), (ROWS, (5, 5, 3)), (COLUMNS, (8, 8))],
    "others": [(ROWS, (8, 8)), (ROWS, (5, 5, 3))],
}


def conv(kernel, **how):
    return lambda x, w: F.conv2d(x, w, **how), (4, 4, kernel, kernel)


def transposed(kernel, **how):
    return lambda x, w: F.conv_transpose2d(x, w, **how), (4, 4, kernel, kernel)


def attention(tokens, w, causal=False):
    w = w[: tokens.shape[-1], : tokens.shape[-1]]
    return F.scaled_dot_product_attention(tokens @ w, tokens, tokens, is_causal=causal)


FUNCTIONS = {  # each with the shape of its weights
    "conv2d 1 x 1": conv(1),
    "conv2d 3 x 3, padding 1": conv(3, padding=1),
    "conv2d 5 x 5, padding 2": conv(5, padding=2),
    "conv2d 3 x 3 without padding": conv(3),
    "conv2d 3 x 3, dilation 2, padding 2": conv(3, dilation=2, padding=2),
    "conv2d 3 x 3, stride 2, padding 1": conv(3, stride=2, padding=1),
    "conv2d 2 x 2, stride 2": conv(2, stride=2),
    "conv2d 4 x 4, stride 2, padding 1": conv(4, stride=2, padding=1),
    'conv2d 4 x 4, padding "same"': conv(4, padding="same"),
    "pad circular, conv2d 3 x 3": (
        lambda x, w: F.conv2d(F.pad(x, (1, 1, 1, 1), "circular"), w),
        (4, 4, 3, 3),
    ),
    "conv_transpose2d 2 x 2, stride 2": transposed(2, stride=2),
    "conv_transpose2d 3 x 3, stride 2, padding 1": transposed(3, stride=2, padding=1),
    "max_pool2d 2": (lambda x: F.max_pool2d(x, 2), None),
    "max_pool2d 3, stride 2, padding 1": (lambda x: F.max_pool2d(x, 3, 2, 1), None),
    "avg_pool2d 2": (lambda x: F.avg_pool2d(x, 2), None),
    "avg_pool2d 3, stride 1, padding 1": (lambda x: F.avg_pool2d(x, 3, 1, 1), None),
    "adaptive_avg_pool2d 1": (lambda x: F.adaptive_avg_pool2d(x, 1), None),
    "interpolate nearest x 2": (lambda x: F.interpolate(x, scale_factor=2.0), None),
    "interpolate bilinear x 2": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        None,
    ),
    "pixel_shuffle 2": (lambda x: F.pixel_shuffle(x, 2), None),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (4,)),
    "batch_norm in training": (
        lambda x, w: F.batch_norm(x, None, None, w, training=True),
        (4,),
    ),
    "instance_norm": (lambda x, w: F.instance_norm(x, weight=w), (4,)),
    "pad reflect": (lambda x: F.pad(x, (1, 1, 2, 1), "reflect"), None),
    "roll along rows": (lambda x: x.roll(3, 2) * x, None),
    "cumsum along rows": (lambda x: x.cumsum(2), None),
    "slice of rows": (lambda x: x[:, :, 1:] - x[:, :, :-1], None),
    "attention": (attention, (16, 16)),
    "causal attention": (lambda x, w: attention(x, w, True), (16, 16)),
    "fft2": (lambda x: torch.fft.fft2(x).abs(), None),
    "mean of rows": (lambda x: x.mean((2, 3)), None),
    "mse_loss": (lambda x: F.mse_loss(x, x.sin()), None),
}


class Peer:
    """DTensor: how to split a tensor, to have one on all ranks, and to gather."""

    def __init__(self, mesh):
        self.mesh = mesh

    def split(self, whole, dim, sizes):
        return distribute_tensor(whole, self.mesh, [Shard(dim)])

    def shared(self, whole):
        return distribute_tensor(whole, self.mesh, [Replicate()])

    def gather(self, x):
        return x.full_tensor() if isinstance(x, DTensor) else x

    def local(self, x):
        return x.to_local() if isinstance(x, DTensor) else x

    def of_weights(self, gradient):
        return self.gather(gradient)


class ShardTensor(Peer):
    """ShardTensor, which meets ordinary tensors as replicated ones."""

    def __init__(self, mesh):
        super().__init__(mesh)
        from physicsnemo import domain_parallel

        self.kind = domain_parallel.ShardTensor
        domain_parallel.register_custom_ops()  # by itself only if CUDA is available

    def split(self, whole, dim, sizes):
        parts = [part.clone() for part in whole.split(sizes, dim)]
        shapes = {0: [tuple(part.shape) for part in parts]}  # inferred ones need CUDA
        own = parts[dist.get_rank()]
        return self.kind.from_local(own, self.mesh, (Shard(dim),), sharding_shapes=shapes).detach()

    def shared(self, whole):
        return whole

    def gather(self, x):
        return x.full_tensor() if hasattr(x, "full_tensor") else x

    def local(self, x):
        return x.to_local() if hasattr(x, "to_local") else x


class Varcomm(Peer):
    """Fields."""

    def split(self, whole, dim, sizes):
        lengths = [sizes if at == dim else None for at in (ROWS, COLUMNS)]
        return vc.grid.Grid(whole.shape[2:], sizes=lengths).scatter(whole)

    def shared(self, whole):
        return whole

    def gather(self, x):
        return x.gather() if isinstance(x, vc.grid.Field) else x

    def local(self, x):
        return x.local if isinstance(x, vc.grid.Field) else x

    def of_weights(self, gradient):
        return vc.all_reduce(gradient)


PEERS = {"dtensor": Peer, "shardtensor": ShardTensor, "varcomm": Varcomm}


def steps(function, x, weights):
    """Yield the output, gradients, and second derivatives."""
    out = function(x, *weights)
    yield "output", out, []
    loss = out.square().mean()
    first = torch.autograd.grad(loss, [x, *weights], create_graph=True)
    yield "gradient", first[0], first[1:]
    second = torch.autograd.grad(first[0].square().sum(), [x, *weights], allow_unused=True)
    yield "second derivative", second[0], second[1:]


def of_one_process(function, image, weights):
    """Return the steps, without second derivatives if torch has none."""
    leaves, found = [t.clone().requires_grad_() for t in (image, *weights)], []
    with contextlib.suppress(RuntimeError):
        for step in steps(function, leaves[0], leaves[1:]):
            found.append(step)
    assert len(found) > 1
    return found


def line(name, dim, sizes, peer):
    """Return the cell of the table: what is equal, and if every rank has the whole output."""
    function, of_weights = FUNCTIONS[name]
    torch.manual_seed(0)
    shape = [2, 4, 8, 8]
    shape[dim] = sum(sizes)
    image = torch.randn(shape, dtype=torch.float64)
    weights = [torch.randn(of_weights, dtype=torch.float64)] if of_weights else []
    expected = of_one_process(function, image, weights)
    own = [peer.shared(w.clone()).requires_grad_() for w in weights]
    found = steps(function, peer.split(image, dim, sizes).requires_grad_(), own)
    equal, whole = [], ""
    for step, want, wants in expected:
        words = f"{' and '.join(equal)} equal; {step}" if equal else step
        try:
            _, got, gots = next(found)
            if (
                not equal
                and want.dim() == 4
                and want.shape[dim] > 1
                and peer.local(got).numel() == want.numel()
            ):
                whole = " (on every rank)"
            others = [(g, w) for g, w in zip(gots, wants, strict=True) if w is not None]
            pairs = [(peer.gather(got), want)]
            pairs += [(g if g is None else peer.of_weights(g), w) for g, w in others]
        except Exception as error:
            text = " ".join(str(error).split())
            short = text if len(text) < 64 else f"{text[:60].rstrip()} ..."
            return f"{words}: `{type(error).__name__}: {short}`"
        for got, want in pairs:
            if got is None:
                return f"{words}: none"
            if got.shape != want.shape:
                return f"{words}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
            apart = float((got - want).abs().max() / want.abs().max())
            if not apart < 1e-6:
                return f"{words}: off by {apart:.2g} of the largest value"
        equal.append(step + whole if step == "output" else step)
    return "equal" + whole


def lines(rank, which, dim, sizes):
    """Return the lines of all functions on this rank."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    peer = PEERS[which](init_device_mesh("cpu", (len(sizes),)))
    found = []
    for name in FUNCTIONS:
        found.append(line(name, dim, sizes, peer))
        dist.barrier()
    return found


def table(which):
    divisions = DIVISIONS.get(which, DIVISIONS["others"])
    columns = [vc.launch(lines, len(sizes), which, dim, sizes)[0] for dim, sizes in divisions]
    words = {ROWS: "rows", COLUMNS: "columns"}
    heads = [f"{words[dim]} {' + '.join(map(str, sizes))}" for dim, sizes in divisions]
    head = ["function", *heads]
    made = [head, ["---"] * len(head), *zip(FUNCTIONS, *columns, strict=True)]
    return "".join(f"| {' | '.join(row)} |\n" for row in made)


if __name__ == "__main__":
    print(table(sys.argv[1]), end="")
