"""Checkpoints on disk: a folder of :func:`save`, or safetensors files of other tools."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from varcomm.checkpoint.paths import Keys, at, decode, joined, nested
from varcomm.checkpoint.shards import boxes_of
from varcomm.errors import ArgumentError
from varcomm.sharding import Box
from varcomm.sharding.files import (
    Files,
    TensorFile,
    check_cover,
    check_is_file,
    read_index,
    verify_files,
)
from varcomm.transport.serialization import dtype_of

__all__ = ["KIND", "Checkpoint", "Part", "SavedTensor", "part_name"]

KIND = "checkpoint"

# The index that Hugging Face writes beside sharded safetensors files.
_HUB_INDEX = "model.safetensors.index.json"


class Part(NamedTuple):
    """A saved box of a tensor: its file, its name there, and its place in the full tensor."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A saved tensor and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def like(self, device: str) -> torch.Tensor:
        """Return an uninitialized tensor of this dtype and shape."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def part_name(key: str, shape: Sequence[int], offsets: Sequence[int], sizes: Sequence[int]) -> str:
    """Return the name of a box in its file.

    >>> part_name("w", (4, 3), (2, 0), (2, 3)), part_name("w", (4, 3), (0, 0), (4, 3))
    ('w[2:4, 0:3]', 'w')
    """
    if tuple(sizes) == tuple(shape):
        return key
    return f"{key}[{', '.join(f'{o}:{o + n}' for o, n in zip(offsets, sizes, strict=True))}]"


class Checkpoint:
    """The content of a checkpoint.

    Attributes
    ----------
    folder : Path
        Folder of the files.
    files : Files or None
        Sizes and digests; None for the files of other tools, which have none.
    paths : dict of str to Keys
    tensors : dict of str to SavedTensor
    values : dict of str to object
        Plain values, decoded.
    digest : str
        Equal on ranks that opened the same checkpoint.
    """

    def __init__(self, folder: Path, files: Files | None) -> None:
        self.folder, self.files = folder, files
        self.paths: dict[str, Keys] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self.values: dict[str, Any] = {}
        self.digest = ""
        self._open: dict[str, TensorFile] = {}

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Read an index, or the headers of the files of other tools, or raise ArgumentError."""
        if path.is_dir() and not (path / f"{KIND}.json").exists():
            for name in (_HUB_INDEX, "model.safetensors"):
                if (path / name).exists():
                    path = path / name
        if path.name.endswith(".index.json"):
            return cls._of_others(path.parent, _hub_files(path))
        if path.suffix == ".safetensors":
            return cls._of_others(path.parent, [path.name])
        content, files = read_index(path, KIND)
        found = cls(path, files)
        by_rank = {int(re.findall(r"rank-(\d+)", name)[-1]): name for name in files}
        try:
            for key, entry in content["entries"].items():
                found._add(key, entry, by_rank)
            _ = found._tree
        except (
            ArgumentError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            RuntimeError,
        ) as error:
            raise ArgumentError(f"{path / KIND}.json is damaged: {error}") from error
        text = json.dumps([content, files], sort_keys=True)
        found.digest = hashlib.sha256(text.encode()).hexdigest()
        return found

    def _add(self, key: str, entry: Mapping[str, Any], by_rank: Mapping[int, str]) -> None:
        path = tuple(_exact_int(n[0], (n[0],)) if isinstance(n, list) else n for n in entry["path"])
        if key != joined(path) or not all(type(n) in (str, int, tuple) for n in path):
            raise ValueError(f"the path of {key!r} is {entry['path']}")
        self.paths[key] = path
        if "value" in entry:
            self.values[key] = decode(entry["value"])
            return
        dtype, shape = dtype_of(entry["dtype"]), _sizes(entry["shape"])
        parts = []
        for rank, offsets, sizes in entry["boxes"]:
            name = part_name(key, shape, offsets, sizes)
            parts.append(Part(by_rank[rank], name, _sizes(offsets), _sizes(sizes)))
        check_cover(key, shape, [part[2:] for part in parts])
        self.tensors[key] = SavedTensor(dtype, shape, tuple(parts))

    @classmethod
    def _of_others(cls, folder: Path, names: Sequence[str]) -> Checkpoint:
        found, text = cls(folder, None), []
        for name in names:
            file = found._file(name)
            for key in file.names:
                if key in found.tensors:
                    raise ArgumentError(f"{folder}: two files have a tensor {key!r}.")
                stored = file.tensor(key)
                part = Part(name, key, (0,) * len(stored.shape), stored.shape)
                found.tensors[key] = SavedTensor(stored.dtype, stored.shape, (part,))
                found.paths[key] = (key,)
                text.append((name, key, str(stored.dtype), stored.shape))
        found.digest = hashlib.sha256(repr(text).encode()).hexdigest()
        return found

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]

    @cached_property
    def _tree(self) -> dict[Any, Any]:
        return nested(
            {
                path: self.values[key] if key in self.values else self.tensors[key].like("meta")
                for key, path in self.paths.items()
            }
        )

    def at(self, path: Keys, default: Any = None) -> Any:
        """Return the saved tree at a path, with tensors on the meta device, or `default`."""
        if self.files is not None:
            return at(self._tree, path, default)
        start = joined(path)
        if start in self.tensors:
            return self.tensors[start].like("meta")
        start = f"{start}." if start else ""
        below = {
            key.removeprefix(start): tensor.like("meta")
            for key, tensor in self.tensors.items()
            if key.startswith(start)
        }
        return below or default

    def has(self, path: Keys) -> bool:
        """Return whether a tensor or value is saved at a path; other tools save flat names."""
        return self.paths.get(joined(path)) == path or (
            self.files is None and joined(path) in self.tensors
        )

    def keys_below(self, name: str) -> Iterator[str]:
        """Yield the keys that belong to a name of the state's first level."""
        for key, path in self.paths.items():
            if self.files is None:
                if key == name or key.startswith(f"{name}."):
                    yield key
            elif path[:1] == (name,):
                yield key

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Raise ArgumentError if a file is missing, cut or altered; reads every P-th file."""
        if self.files is None:
            return  # their headers have been read
        verify_files(self.folder, self.files, rank, ranks)
        mine = {*sorted(self.files)[rank::ranks]}
        for tensor in self.tensors.values():
            for part in tensor.parts:
                if part.file in mine:
                    self._file(part.file).tensor(part.name).check(tensor.dtype, part.sizes)

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Overwrite the boxes of tensors on this rank with saved elements; reads only these."""
        wanted: dict[str, list[tuple[Part, Box, torch.dtype]]] = {}
        for key, target in targets.items():
            saved = self.tensors[key]
            for box in boxes_of(key, target):
                for part in saved.parts:
                    wanted.setdefault(part.file, []).append((part, box, saved.dtype))
        for name in sorted(wanted):
            for part, box, dtype in wanted[name]:
                _copy(self._file(name), part, box, dtype)

    def close(self) -> None:
        """Close the files that have been opened."""
        self._open.clear()


def _copy(file: TensorFile, part: Part, box: Box, dtype: torch.dtype) -> None:
    """Copy the elements that a saved part and a box of the target have in common."""
    low = [max(a, b) for a, b in zip(part.offsets, box.offsets, strict=True)]
    ends = zip(part.offsets, part.sizes, box.offsets, box.tensor.shape, strict=True)
    sizes = [min(a + n, b + m) - at for at, (a, n, b, m) in zip(low, ends, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    stored = file.tensor(part.name)
    stored.check(dtype, part.sizes)
    found = stored.read(dtype, [at - a for at, a in zip(low, part.offsets, strict=True)], sizes)
    within = tuple(
        slice(at - b, at - b + n) for at, b, n in zip(low, box.offsets, sizes, strict=True)
    )
    with torch.no_grad():
        box.tensor[within].copy_(found)


def _hub_files(path: Path) -> list[str]:
    """Return the file names in an index of Hugging Face's."""
    try:
        check_is_file(path)
        content = json.loads(path.read_text())
        names = sorted({str(name) for name in content["weight_map"].values()})
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error}.") from error
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{path} is not an index with a weight_map: {error!r}.") from error
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ArgumentError(f"{path} names {name!r}, which is not a file of its folder.")
    return names


def _exact_int(value: Any, result: Any) -> Any:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a size")
    return result


def _sizes(values: Any) -> tuple[int, ...]:
    return tuple(_exact_int(value, value) for value in values)
