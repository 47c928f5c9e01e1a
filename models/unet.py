"""U-Net: convolutions on coarser and coarser images, joined with those before.

O. Ronneberger, P. Fischer and T. Brox, "U-Net: Convolutional networks for biomedical image
segmentation", MICCAI 2015; with group norms and attention as in diffusion models: J. Ho, A. Jain
and P. Abbeel, "Denoising diffusion probabilistic models", NeurIPS 2020.
"""

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .sizes import check_heads, check_sizes


class Convolution(nn.Conv2d):
    """A convolution that keeps the size; along periodic columns the last follows the first."""

    def __init__(
        self, in_channels: int, out_channels: int, periodic: bool, stride: int = 1
    ) -> None:
        padding = (1, 0) if periodic else 1
        super().__init__(in_channels, out_channels, 3, stride=stride, padding=padding)
        self.periodic = periodic

    def forward(self, x: Tensor) -> Tensor:
        """Return features, (N, out_channels, rows, columns), from (N, in_channels, ...)."""
        if self.periodic:
            x = F.pad(x, (1, 1, 0, 0), mode="circular")
        return super().forward(x)


def _behind_norm(in_channels: int, out_channels: int, groups: int, periodic: bool) -> nn.Sequential:
    """Return a convolution behind a norm and an activation."""
    convolution = Convolution(in_channels, out_channels, periodic)
    return nn.Sequential(nn.GroupNorm(groups, in_channels), nn.SiLU(), convolution)


class Block(nn.Module):
    """Two convolutions behind norms, with a residual connection."""

    def __init__(self, in_channels: int, out_channels: int, groups: int, periodic: bool) -> None:
        super().__init__()
        self.first = _behind_norm(in_channels, out_channels, groups, periodic)
        self.second = _behind_norm(out_channels, out_channels, groups, periodic)
        same = in_channels == out_channels
        self.skip = nn.Identity() if same else nn.Conv2d(in_channels, out_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, (N, out_channels, rows, columns)."""
        return cast(Tensor, self.skip(x) + self.second(self.first(x)))


class ImageAttention(nn.Module):
    """Attention between all pixels, with a residual connection."""

    def __init__(self, channels: int, num_heads: int, groups: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels)
        self.attention = nn.MultiheadAttention(channels, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return features of the shape of `x`, (N, channels, rows, columns)."""
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        out = self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return cast(Tensor, x + out.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Predict an image from an image, at several resolutions.

    The model [1]_ has no code for ranks: on a field of :class:`varcomm.grid.Grid` it is exact for
    any rows per rank. Images may have any size. Each level has half the rows and columns of the one
    above, rounded up, and is interpolated back to the size that was there.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels of the input and of the output.
    hidden_channels : int
        Channels of the first level, a multiple of `num_groups`; each next level has twice as many.
    num_levels : int
        Levels below the first; 0 is a residual network.
    num_groups : int
        Groups of channels of each norm.
    num_heads : int, optional
        Heads of attention between all pixels of the lowest level [2]_; None means no attention.
        Attention needs a grid that is split along rows alone.
    periodic : bool
        Whether columns are longitudes around the globe: the last follows the first.

    Raises
    ------
    ArgumentError
        If a size is not positive, or does not divide.

    See Also
    --------
    FNO, varcomm.grid.Grid

    References
    ----------
    .. [1] O. Ronneberger, P. Fischer and T. Brox, "U-Net: Convolutional networks for biomedical
       image segmentation", MICCAI 2015, https://arxiv.org/abs/1505.04597
    .. [2] J. Ho, A. Jain and P. Abbeel, "Denoising diffusion probabilistic models", NeurIPS 2020,
       https://arxiv.org/abs/2006.11239

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.models import UNet
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     model, image = UNet(2, 1, hidden_channels=8, num_levels=2), torch.randn(1, 2, 13, 10)
    ...     grid = varcomm.grid.Grid((13, 10), sizes=[[9, 4], None])
    ...     found = model(grid.scatter(image)).gather()
    ...     return torch.allclose(found, model(image), atol=1e-5)
    >>> varcomm.launch(fn, 2)
    [True, True]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_levels: int = 3,
        num_groups: int = 4,
        num_heads: int | None = None,
        periodic: bool = False,
    ) -> None:
        super().__init__()
        check_sizes(
            "UNet",
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
            num_groups=num_groups,
        )
        check_sizes("UNet", least=0, num_levels=num_levels)
        check_heads("UNet", hidden_channels, num_groups, "num_groups")
        channels = [hidden_channels * 2**level for level in range(num_levels + 1)]
        pairs, lowest = [*pairwise(channels)], channels[-1]
        self.encoder = Convolution(in_channels, hidden_channels, periodic)
        self.down_blocks = nn.ModuleList(Block(a, a, num_groups, periodic) for a, _ in pairs)
        self.down = nn.ModuleList(Convolution(a, b, periodic, stride=2) for a, b in pairs)
        self.up = nn.ModuleList(Convolution(b, a, periodic) for a, b in pairs)
        self.up_blocks = nn.ModuleList(Block(2 * a, a, num_groups, periodic) for a, _ in pairs)
        self.middle = nn.Sequential(Block(lowest, lowest, num_groups, periodic))
        if num_heads is not None:
            check_sizes("UNet", num_heads=num_heads)
            check_heads("UNet", lowest, num_heads)
            self.middle.append(ImageAttention(lowest, num_heads, num_groups))
        self.middle.append(Block(lowest, lowest, num_groups, periodic))
        self.decoder = _behind_norm(hidden_channels, out_channels, num_groups, periodic)

    def forward(self, x: Tensor) -> Tensor:
        """Predict at each pixel.

        Parameters
        ----------
        x : Tensor
            Images, (N, in_channels, rows, columns), or a field of them.

        Returns
        -------
        Tensor
            Predictions, (N, out_channels, rows, columns).

        Notes
        -----
        Communication on a field: a message to each neighbour before each convolution, and the
        moments of each norm. Each rank has its part of the gradients of parameters: call
        :func:`varcomm.data_parallel.sum_gradients`.
        """
        x, skips = self.encoder(x), []
        for block, down in zip(self.down_blocks, self.down, strict=True):
            skips.append(block(x))
            x = down(skips[-1])
        x = self.middle(x)
        levels = [*zip(skips, self.up, self.up_blocks, strict=True)]
        for skip, up, block in reversed(levels):
            x = up(F.interpolate(x, size=skip.shape[-2:]))
            x = block(torch.cat([x, skip], dim=1))
        return cast(Tensor, self.decoder(x))
