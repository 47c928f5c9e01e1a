"""The files of a saved partition: one of numbers a rank, and one that tells what they are.

``graph.json`` holds names, sizes, dtypes and a digest of each file, itself included; ``graph.npz``
what belongs to the graph as a whole, ``part-00000.npz`` and so on what belongs to a rank: arrays in
NumPy's format, without pickle. A file that was cut short, altered or taken from another graph does
not have the digest that ``graph.json`` expects. What a file says of its own length is not believed:
nothing is made room for that the file has not.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.lib import format as npy

from varcomm.errors import ArgumentError

__all__ = [
    "MANIFEST",
    "as_json",
    "digest_of",
    "is_manifest",
    "read_arrays",
    "read_manifest",
    "write_arrays",
    "write_manifest",
]

MANIFEST = "graph.json"

_FORMAT, _VERSION = "varcomm partitioned graph", 1
_OTHER = f"{{}} is not what {MANIFEST} expects: it is of another graph, or damaged."

Arrays = Mapping[str, torch.Tensor]


def write_manifest(folder: Path, content: Mapping[str, Any]) -> None:
    """Write what tells what the arrays are."""
    whole = {"format": _FORMAT, "version": _VERSION, **content}
    whole["digest"] = _digest_of_manifest(whole)
    (folder / MANIFEST).write_text(json.dumps(whole, indent=1) + "\n")


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return what :func:`write_manifest` wrote, or raise ArgumentError."""
    path = folder / MANIFEST
    try:
        _check_is_file(path)
        content = json.loads(path.read_text())
    except OSError as error:
        raise ArgumentError(
            f"{folder} is no saved partition: {path.name} cannot be read "
            f"({error.strerror or error})."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is damaged: {error}. Save the graph again.") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ArgumentError(f"{path} does not belong to a saved partition.")
    if content.get("version") != _VERSION:
        raise ArgumentError(
            f"{path} is of version {content.get('version')}; this varcomm reads version {_VERSION}."
        )
    if content.pop("digest", None) != _digest_of_manifest(content):
        raise ArgumentError(f"{path} is damaged or has been altered. Save the graph again.")
    return content


def is_manifest(path: Path) -> bool:
    """Return whether a file begins as :func:`write_manifest` does, damaged as the rest may be."""
    start = json.dumps({"format": _FORMAT}, indent=1).removesuffix("\n}")
    try:
        _check_is_file(path)
        with path.open() as file:
            return file.read(len(start)) == start
    except (OSError, ValueError):
        return False


def _digest_of_manifest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_arrays(path: Path, arrays: Arrays) -> None:
    """Write arrays by their names."""
    np.savez(path, allow_pickle=False, **{name: _numpy(v) for name, v in arrays.items()})


def read_arrays(
    path: Path, dtypes: Mapping[str, torch.dtype], digest: str
) -> dict[str, torch.Tensor]:
    """Return the arrays in a file, which have these names, dtypes and this digest."""
    try:
        _check_is_file(path)
        with zipfile.ZipFile(path) as file:
            there = set(file.namelist())
            if not {f"{name}.npy" for name in dtypes} <= there:
                raise ArgumentError(_OTHER.format(path))
            members = {name: file.getinfo(f"{name}.npy") for name in dtypes}
            if sum(member.file_size for member in members.values()) > path.stat().st_size:
                raise ValueError("it tells of more than there is in it")
            arrays = {
                name: torch.from_numpy(_array(file, member)).view(dtypes[name])
                for name, member in members.items()
            }
    except FileNotFoundError as error:
        raise ArgumentError(
            f"{path.parent} lacks {path.name}. Copy it there, or save the graph again."
        ) from error
    except (ArgumentError, MemoryError):  # of memory: it is as long as it says
        raise
    except Exception as error:  # of zipfile, NumPy or torch, depending on where the damage is
        raise ArgumentError(f"{path} is damaged: {error}. Save the graph again.") from error
    if digest_of(arrays) != digest:
        raise ArgumentError(_OTHER.format(path))
    return arrays


def _check_is_file(path: Path) -> None:
    """Raise OSError if there is no file, or what never ends: a pipe or a device, also by a link."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no file")


def _array(file: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray[Any, Any]:
    """Return an array, if there are as many bytes as it says that it has."""
    with file.open(member) as stream:
        version = npy.read_magic(stream)
        header = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}[version]
        shape, _, dtype = header(stream)
        if stream.tell() + math.prod(shape) * dtype.itemsize != member.file_size:
            raise ValueError(f"{member.filename} has not {list(shape)} of {dtype}")
    with file.open(member) as stream:
        return npy.read_array(stream, allow_pickle=False)


def digest_of(arrays: Arrays) -> str:
    """Return what tells arrays, with their names, dtypes and shapes, apart from others."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = _numpy(arrays[name])
        digest.update(repr((name, str(arrays[name].dtype), array.shape)).encode())
        digest.update(array.data if array.size else b"")
    return digest.hexdigest()


def as_json(name: str, value: Any) -> Any:
    """Return a value of the graph as a whole if a text can hold it, else raise ArgumentError."""
    try:
        if json.loads(json.dumps(value, allow_nan=False)) == value:
            return value
    except (TypeError, ValueError):
        pass
    raise ArgumentError(
        f"{name} cannot be saved: it is of {type(value).__name__}. Tensors can be, and numbers, "
        "texts, lists of them and dicts by text; keep it apart."
    )


def _numpy(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a contiguous array; of what NumPy does not know, the bits."""
    value = value.detach().cpu().contiguous()
    try:
        return value.numpy()
    except TypeError:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[value.element_size()]
        return value.view(bits).numpy()
