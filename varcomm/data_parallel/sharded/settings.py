"""How a ShardedGradients is to work, checked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite

import torch

from varcomm.data_parallel.global_count import GlobalCount, described
from varcomm.data_parallel.sharded.reduction import Scaling, predivide_factor
from varcomm.data_parallel.sharded.split import WHOLE
from varcomm.errors import ArgumentError
from varcomm.sizes import at_least, checked_sizes

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """The arguments of ``ShardedGradients`` that are the same on all ranks."""

    sizes: object
    reduce: object
    fp32_reduce_scatter: bool
    gradient_predivide_factor: float | None
    fp32_masters: bool
    cpu_offload: bool
    overlap_forward: bool
    bucket_bytes: int

    @property
    def whole(self) -> bool:
        """Whether parameters have one owner."""
        return isinstance(self.sizes, str) and self.sizes == WHOLE

    def checked(self, module: torch.nn.Module | None, ranks: int) -> Settings:
        """Return the same with ints as sizes, or raise ArgumentError if a setting is none."""
        for name in ("fp32_reduce_scatter", "fp32_masters", "cpu_offload", "overlap_forward"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name} must be True or False; got {getattr(self, name)!r}.")
        at_least(1, self.bucket_bytes, "bucket_bytes")
        described(self.reduce)
        factor = self.gradient_predivide_factor
        if factor is not None:
            number = isinstance(factor, int | float) and not isinstance(factor, bool)
            if not number or not isfinite(factor) or factor <= 0:
                raise ArgumentError(
                    f"gradient_predivide_factor must be a positive number; got {factor!r}."
                )
        if self.overlap_forward and module is None:
            raise ArgumentError(
                "overlap_forward=True needs the module whose forward waits for its parameters. "
                "Pass the model as params, or as module=..."
            )
        if isinstance(self.sizes, str):
            return self
        sizes = checked_sizes(self.sizes, "sizes", ranks)  # type: ignore[arg-type]
        return replace(self, sizes=sizes)

    def describe(self) -> dict[str, str]:
        """Return what ranks compare."""
        told = {name: repr(value) for name, value in vars(self).items()}
        sizes = self.sizes
        told["sizes"] = repr(sizes) if isinstance(sizes, str) else repr(list(sizes))  # type: ignore[call-overload]
        told["reduce"] = described(self.reduce)
        return told

    def scaling(self, ranks: int) -> Scaling:
        """Return how sums are divided."""
        divisor = {"sum": 1.0, "mean": float(ranks)}.get(str(self.reduce))
        before = self.gradient_predivide_factor
        if before is None:
            before = predivide_factor(ranks) if self.reduce == "mean" else 1.0
        return Scaling(self.fp32_reduce_scatter, float(before), divisor)

    @property
    def count(self) -> GlobalCount | None:
        """What sums are divided by, where that is a count."""
        return self.reduce if isinstance(self.reduce, GlobalCount) else None

    def of_pieces(self, parameter: torch.Tensor) -> tuple[torch.dtype, torch.device]:
        """Return of which dtype and where the optimizer works on a piece of a parameter."""
        narrow = parameter.is_floating_point() and parameter.itemsize < 4
        dtype = torch.float32 if narrow and self.fp32_masters else parameter.dtype
        return dtype, torch.device("cpu") if self.cpu_offload else parameter.device
