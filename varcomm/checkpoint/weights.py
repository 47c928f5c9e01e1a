"""``load_safetensors``: weights of other tools into a sharded model, each rank its slices."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import and_
from pathlib import Path
from typing import Any

import torch

from varcomm.checkpoint.index import Checkpoint
from varcomm.checkpoint.parts import Ranks, alone, boxes_of, few, wrapped
from varcomm.checkpoint.save import finish_pending
from varcomm.errors import ArgumentError
from varcomm.ops.checks import checked_flag
from varcomm.ops.digest import require_equal
from varcomm.sharding import Box
from varcomm.sharding.sharded import refuse_unwritable
from varcomm.sharding.tied import named_tensors
from varcomm.transport.group import GroupLike

_WHAT = "checkpoint.load_safetensors"

Names = Mapping[str, str] | Callable[[str], str]

# By the id of a tensor of the model: the tensor to load, and its names in the files.
_Loads = dict[int, tuple[torch.Tensor, list[str]]]


@torch.no_grad()
def load_safetensors(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    names: Names | None = None,
    *,
    device: torch.device | str = "cpu",
    strict: bool = True,
    group: GroupLike = None,
) -> None:
    """Load safetensors files into a sharded model; each rank reads its own slices only.

    Collective: all ranks of `group` call it. One process needs no torch.distributed. `model` may be
    on the meta device, so that no rank ever holds the full model.

    Parameters
    ----------
    model : torch.nn.Module
        Parameters of tensor-parallel layers, parameters marked by :func:`~varcomm.sharding.mark`
        and DTensors are shards; all other tensors are full. Tensors on the meta device are replaced
        by loaded tensors on `device`, all others are overwritten in place.
    folder : str or path
        A ``.safetensors`` file; an index with a ``weight_map``, as Hugging Face writes it; or a
        folder with ``model.safetensors`` or ``model.safetensors.index.json``.
    names : mapping or callable, optional
        Map from names of ``model.state_dict()`` to names in the files. Names that a mapping lacks
        are the same in the files.
    device : torch.device or str
        Target device for tensors that are on the meta device.
    strict : bool
        Refuse files with tensors that no rank loads.
    group : ProcessGroup or DeviceMesh, optional
        Ranks that take part; None means the whole world.

    Raises
    ------
    ArgumentError, DisagreementError
        On every rank, if files are missing, damaged, or differ between ranks. Also raised if a name
        is missing in the files, or a shape or dtype does not match. Also raised if a tensor on the
        meta device is not in the state dict. Then nothing is changed. Also raised if a file has
        different values for two names that share a parameter; then parameters may have been
        overwritten.

    See Also
    --------
    load, export, varcomm.tensor_parallel.parallelize

    Notes
    -----
    Values are converted to the dtype of the model: between fp16, bf16, fp32 and fp64 with rounding
    to nearest. All other dtypes must be equal. If several names share a parameter, the files must
    contain one of the names.

    Communication: three rounds of small messages. No weight is sent.

    In one process: ``model.load_state_dict(load_file(file))``.

    Examples
    --------
    >>> import tempfile, torch, varcomm
    >>> from safetensors.torch import save_file
    >>> from varcomm.checkpoint import load_safetensors
    >>> from varcomm.tensor_parallel import ColumnParallelLinear
    >>> def fn(rank, folder):
    ...     layer = ColumnParallelLinear(1, 3, bias=False, device="meta")
    ...     load_safetensors(layer, folder)
    ...     return layer.weight.flatten().tolist()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"weight": torch.arange(3.0).view(3, 1)}, f"{folder}/model.safetensors")
    ...     varcomm.launch(fn, 2, folder)
    [[0.0, 1.0], [2.0]]
    """
    ranks = Ranks.of(group)

    def find() -> Checkpoint:
        finish_pending()
        if not isinstance(model, torch.nn.Module):
            raise ArgumentError(f"model must be a Module; got {type(model).__name__}.")
        if not (names is None or callable(names) or isinstance(names, Mapping)):
            raise ArgumentError(f"names must be a mapping or a function; got {names!r}.")
        checked_flag(strict, "strict", "")
        opened = Checkpoint(Path(folder))
        if opened.files is not None:
            raise ArgumentError(f"{folder} has a checkpoint of varcomm. Use checkpoint.load.")
        return opened

    def called(found: Checkpoint) -> dict[str, Any]:
        return {f"the tensors of {folder}": found.digest, "strict": strict}

    found, same = ranks.agree(_WHAT, find, called)
    require_equal(_WHAT, same)
    (loads, *_), fits = ranks.agree(
        _WHAT, lambda: _loads_of(model, found, names, device), lambda result: result[1:]
    )
    alone(_WHAT, lambda: _check_fit(found, fits, strict))  # the same on all ranks
    ranks.agree(_WHAT, lambda: _read(found, loads))
    for module in model.modules():
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        for name, old in own:
            if old.is_meta:
                setattr(module, name, loads[id(old)][0])


def _check_fit(found: Checkpoint, fits: Sequence[tuple[list[str], int]], strict: bool) -> None:
    """Raise, the same on all ranks, if the models of all ranks do not match the files."""
    problems = [*dict.fromkeys(problem for some, _ in fits for problem in some)]
    unused = found.of_bits(reduce(and_, (unused for _, unused in fits)))
    reasons = []
    if problems:
        reasons.append(f"{len(problems)} tensors of the model do not match: {few(problems)}")
    if strict and unused:
        reasons.append(
            f"{len(unused)} tensors are not in the model: {few(unused)} (strict=False ignores them)"
        )
    if reasons:
        raise ArgumentError(
            f"{found.folder} has the tensors of another model. {'; '.join(reasons)}. Nothing has "
            "been loaded. If names differ, pass names=."
        )


def _loads_of(
    model: torch.nn.Module, found: Checkpoint, names: Names | None, device: torch.device | str
) -> tuple[_Loads, list[str], int]:
    """Return the loads of a model, problems, and the unused tensors of the files as bits."""
    loads: _Loads = {}
    problems: list[str] = []
    used: set[str] = set()
    mapping = {} if names is None or callable(names) else names
    named = named_tensors(model)
    for tensor, own in named:
        given = [names(n) if callable(names) else mapping.get(n, n) for n in own]
        present = [name for name in dict.fromkeys(given) if name in found.tensors]
        used.update(present)
        target = wrapped(tensor)
        shape, wrong = tuple(target.shape), list[str]()
        if not present:
            wrong.append(f"{' or '.join(map(repr, given))} is missing in the files")
        for name in present:
            dtype, stored, _ = found.tensors[name]
            if stored != shape or not _converts(dtype, tensor.dtype):
                wrong.append(
                    f"{name!r} has {stored}, {dtype} in the files and {shape}, {tensor.dtype} in "
                    "the model"
                )
        if not tensor.is_meta:
            for box in boxes_of(own[0], target):
                refuse_unwritable(repr(own[0]), box.tensor)
        problems += wrong
        if not wrong:
            loads[id(tensor)] = _on(device, tensor), present
    in_state = {id(tensor) for tensor, _ in named}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta and id(tensor) not in in_state:
            problems.append(
                f"{name!r} is on the meta device and not in the state dict, so no file has its "
                "values; compute them before"
            )
    return loads, problems, found.bits(found.tensors.keys() - used)


def _read(found: Checkpoint, loads: _Loads) -> None:
    """Read this rank's slices, or raise ArgumentError."""
    for tensor, (first, *others) in loads.values():
        boxes = boxes_of(first, wrapped(tensor))
        found.read(first, boxes)
        for name in others:
            again = [Box(box.offsets, torch.empty_like(box.tensor)) for box in boxes]
            found.read(name, again)
            if not all(map(_equal, boxes, again)):
                raise ArgumentError(
                    f"{first!r} and {name!r} share a parameter of the model, and have different"
                    " values in the files."
                )


def _on(device: torch.device | str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor itself, or an uninitialized one like it, if it is on the meta device."""
    if not tensor.is_meta:
        return tensor
    made = torch.empty_like(tensor, device=device)
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))  # the mark, which says how it is sharded
    return made


def _converts(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether values convert: exactly, or between floats of two bytes and more."""
    floats = all(dtype.is_floating_point and dtype.itemsize > 1 for dtype in (stored, wanted))
    return stored == wanted or floats


def _equal(one: Box, other: Box) -> bool:
    """Return whether two boxes are equal, bit by bit."""
    first, second = (box.tensor.contiguous().reshape(-1).view(torch.uint8) for box in (one, other))
    return torch.equal(first, second)
