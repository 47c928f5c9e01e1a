"""Fourier neural operator: learned filters of the lowest frequencies of a field.

Z. Li et al., "Fourier neural operator for parametric partial differential equations",
International Conference on Learning Representations, 2021.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from varcomm.errors import ArgumentError

from .sizes import check_sizes


class SpectralConvolution(nn.Module):
    """Multiply the lowest frequencies of an image by matrices between channels.

    Parameters
    ----------
    channels : int
        Channels of the input and of the output.
    modes : sequence of int
        Frequencies that are kept along rows, on each side of zero, and along columns.
    """

    def __init__(self, channels: int, modes: Sequence[int]) -> None:
        super().__init__()
        self.modes = tuple(modes)
        # of frequencies along rows from zero on, and of negative ones; real and imaginary parts
        shape = 2, channels, channels, *self.modes, 2
        self.weight = nn.Parameter(torch.randn(shape) / (2**0.5 * channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return filtered images, (N, channels, rows, columns)."""
        rows, columns = x.shape[-2:]
        m, n = self.modes
        # A split field sends only columns that are kept, and joined slices stay on their ranks.
        spectrum = torch.fft.rfft(x, norm="ortho")[..., :n]
        spectrum = torch.fft.fft(spectrum, dim=-2, norm="ortho")
        weights = torch.view_as_complex(self.weight)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :m], weights[0])
        negative = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, rows - m :], weights[1])
        zeros = torch.zeros_like(spectrum[:, :, m : rows - m])
        out = torch.cat([low, zeros, negative], dim=2)
        out = torch.fft.ifft(out, dim=-2, norm="ortho")
        return cast(Tensor, torch.fft.irfft(out, n=columns, norm="ortho"))


def _pointwise(in_channels: int, wide: int, out_channels: int) -> nn.Sequential:
    """Return two layers that see one point each."""
    return nn.Sequential(
        nn.Conv2d(in_channels, wide, 1), nn.GELU(), nn.Conv2d(wide, out_channels, 1)
    )


class FNO(nn.Module):
    """Predict a field from a field by filters of its lowest frequencies.

    The model [1]_ has no code for ranks: on a field of :class:`varcomm.grid.Grid` it is exact for
    any rows per rank. Trained at one resolution, it runs at others.

    Parameters
    ----------
    in_channels, out_channels : int
        Channels of the input, such as values and coordinates, and of the output.
    hidden_channels : int
        Channels of the blocks.
    num_blocks : int
        Blocks: a spectral and a pointwise convolution each.
    modes : pair of int
        Frequencies that are kept along rows, on each side of zero, and along columns.
    padding : int
        Rows and columns of zeros behind the field, which a field without periods needs.

    Raises
    ------
    ArgumentError
        If a size is not positive, or a field has fewer frequencies than `modes`.

    See Also
    --------
    UNet, varcomm.grid.Grid

    References
    ----------
    .. [1] Z. Li et al., "Fourier neural operator for parametric partial differential equations",
       ICLR 2021, https://arxiv.org/abs/2010.08895

    Examples
    --------
    >>> import torch, varcomm
    >>> from varcomm.models import FNO
    >>> def fn(rank):
    ...     torch.manual_seed(0)
    ...     model = FNO(1, 1, hidden_channels=8, num_blocks=2, modes=(3, 4))
    ...     whole, grid = torch.randn(1, 1, 13, 10), varcomm.grid.Grid((13, 10))
    ...     found = model(grid.scatter(whole)).gather()
    ...     return torch.allclose(found, model(whole), atol=1e-5)
    >>> varcomm.launch(fn, 2)
    [True, True]
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        hidden_channels: int,
        num_blocks: int,
        modes: Sequence[int],
        padding: int = 0,
    ) -> None:
        super().__init__()
        check_sizes(
            "FNO",
            in_channels=in_channels,
            out_channels=out_channels,
            hidden_channels=hidden_channels,
        )
        check_sizes("FNO", least=0, num_blocks=num_blocks, padding=padding)
        if len(modes) != 2:
            raise ArgumentError(f"FNO: modes must be those of rows and of columns; got {modes!r}.")
        check_sizes("FNO", **{f"modes[{dim}]": count for dim, count in enumerate(modes)})
        self.modes, self.padding = tuple(modes), padding
        self.encoder = _pointwise(in_channels, 2 * hidden_channels, hidden_channels)
        self.filters = nn.ModuleList(
            SpectralConvolution(hidden_channels, modes) for _ in range(num_blocks)
        )
        self.points = nn.ModuleList(
            nn.Conv2d(hidden_channels, hidden_channels, 1) for _ in range(num_blocks)
        )
        self.decoder = _pointwise(hidden_channels, 2 * hidden_channels, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Predict at each point.

        Parameters
        ----------
        x : Tensor
            Values, (N, in_channels, rows, columns), or a field of them.

        Returns
        -------
        Tensor
            Predictions, (N, out_channels, rows, columns).

        Notes
        -----
        Communication on a field: each transform along split rows sends the columns of frequencies
        that are kept, twice: to whole rows and back. Each rank has its part of the gradients of
        parameters: call :func:`varcomm.data_parallel.sum_gradients`.
        """
        rows, columns = x.shape[-2:]
        known = (rows + self.padding) // 2, (columns + self.padding) // 2 + 1
        if any(have < kept for have, kept in zip(known, self.modes, strict=True)):
            raise ArgumentError(
                f"FNO: a field of {rows} x {columns} points has {known[0]} frequencies on each "
                f"side of zero along rows and {known[1]} along columns, fewer than modes "
                f"{self.modes}."
            )
        x = F.pad(self.encoder(x), (0, self.padding, 0, self.padding))
        for place, (filtered, point) in enumerate(zip(self.filters, self.points, strict=True)):
            x = point(x) + filtered(x)  # split as the first one
            x = F.gelu(x) if place + 1 < len(self.points) else x
        return cast(Tensor, self.decoder(x[..., :rows, :columns]))
