"""Index of a checkpoint: paths of values, plain values as JSON, boxes of tensors in files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch

from varcomm.errors import ArgumentError
from varcomm.sharding import Box
from varcomm.sharding.files import (
    TensorFile,
    check_cover,
    digest_of_json,
    read_index,
    reading,
    verify_files,
)
from varcomm.transport.serialization import decoded, dtype_of

KIND = "checkpoint"

# From the outermost container inwards: a text or an int is a key of a dict, (n,) a place in a list.
Keys: TypeAlias = tuple[str | int | tuple[int], ...]

# The index that Hugging Face writes beside sharded safetensors files.
_HUB_INDEX = "model.safetensors.index.json"


def joined(path: Keys) -> str:
    """Return the flat key of a path.

    >>> joined(("model", "0.weight")), joined(("options", (0,), "lr"))
    ('model.0.weight', 'options.0.lr')
    """
    return ".".join(str(name[0] if isinstance(name, tuple) else name) for name in path)


def nested(flat: Mapping[Keys, Any]) -> Any:
    """Return the dicts and lists that have these values at these paths, or raise ArgumentError.

    >>> nested({("a", "b"): 1, ("c", (0,)): 2, ("c", (1,)): 3, ("d", 7): 4})
    {'a': {'b': 1}, 'c': [2, 3], 'd': {7: 4}}
    """
    if len(flat) == 1 and () in flat:
        return flat[()]
    parts: dict[Any, dict[Keys, Any]] = {}
    for path, value in flat.items():
        if not path:
            raise ArgumentError(f"{value!r} is both a value and a container.")
        parts.setdefault(path[0], {})[path[1:]] = value
    built = {name: nested(inner) for name, inner in parts.items()}
    places = [name for name in built if isinstance(name, tuple)]
    if places and len(places) < len(built):
        raise ArgumentError(f"{list(built)[:5]} are keys of both a list and a dict.")
    return [built[place] for place in sorted(places)] if places else built


def at(tree: Any, path: Keys, default: Any = None) -> Any:
    """Return the value at a path in dicts and lists, or `default`."""
    for name in path:
        if isinstance(name, tuple):
            if not isinstance(tree, list) or name[0] >= len(tree):
                return default
            tree = tree[name[0]]
        elif isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        else:
            return default
    return tree


class Part(NamedTuple):
    """A saved box of a tensor: its file, its name there, and its place in the full tensor."""

    file: str
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class SavedTensor(NamedTuple):
    """A saved tensor and the boxes that make it up."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    def empty(self, device: str = "meta") -> torch.Tensor:
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
    """The content of a checkpoint: a folder of :func:`save`, or safetensors files of other tools.

    `files` is None for other tools; `digest` is equal on ranks that opened the same checkpoint.
    ArgumentError if there is none, or if the index or a header is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.paths: dict[str, Keys] = {}
        self.tensors: dict[str, SavedTensor] = {}
        self.values: dict[str, Any] = {}
        self._open: dict[str, TensorFile] = {}
        self.folder, names = _of_other_tools(path)
        if names is not None:
            self.files, content = None, self._headers(names)
        else:
            content, self.files = read_index(path, KIND)
            with reading(path / f"{KIND}.json"):
                self._add_entries(content["entries"])
        flat = {**self.values, **{key: tensor.empty() for key, tensor in self.tensors.items()}}
        self._tree = nested({path: flat[key] for key, path in self.paths.items()})
        self.digest = digest_of_json([content, self.files])

    def _headers(self, names: Iterable[str]) -> dict[str, Any]:
        """Add the tensors of other tools' files; return a description."""
        found = {}
        for name in names:
            file = self._file(name)
            for key in file.names:
                if key in self.tensors:
                    raise ArgumentError(f"{self.folder}: two files have a tensor {key!r}.")
                dtype, shape = file.stored(key)
                part = Part(name, key, (0,) * len(shape), shape)
                self.tensors[key] = SavedTensor(dtype, shape, (part,))
                self.paths[key] = (key,)
                found[key] = name, str(dtype), shape
        return found

    def _add_entries(self, entries: Mapping[str, Any]) -> None:
        by_rank = {int(re.findall(r"rank-(\d+)", name)[-1]): name for name in self.files or ()}
        for key, entry in entries.items():
            names: list[Any] = entry["path"]
            path = tuple(_sizes(name[:1]) if isinstance(name, list) else name for name in names)
            if not all(type(name) in (str, int, tuple) for name in path) or key != joined(path):
                raise ValueError(f"the path of {key!r} is {names}")
            self.paths[key] = path
            if "value" in entry:
                self.values[key] = decoded(entry["value"])
                continue
            shape, parts = _sizes(entry["shape"]), []
            for rank, *box in entry["boxes"]:
                offsets, sizes = map(_sizes, box)
                name = part_name(key, shape, offsets, sizes)
                parts.append(Part(by_rank[rank], name, offsets, sizes))
            check_cover(key, shape, [(part.offsets, part.sizes) for part in parts])
            self.tensors[key] = SavedTensor(dtype_of(entry["dtype"]), shape, tuple(parts))

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            self._open[name] = TensorFile(self.folder / name)
        return self._open[name]

    def bits(self, keys: Iterable[str]) -> int:
        """Return keys as the bits of a number, which is a short message; others do not count."""
        places = {key: place for place, key in enumerate(sorted(self.paths))}
        return sum(1 << places[key] for key in keys if key in places)

    def of_bits(self, bits: int) -> list[str]:
        """Return the keys of :meth:`bits` as quoted words."""
        return [repr(key) for place, key in enumerate(sorted(self.paths)) if bits >> place & 1]

    def keys(self, path: Keys) -> set[str]:
        """Return the keys at a path and inside it."""
        if self.files is not None:
            return {key for key, own in self.paths.items() if own[: len(path)] == path}
        name, start = joined(path), joined((*path, ""))
        return {key for key in self.paths if key == name or key.startswith(start)}

    def at(self, path: Keys, default: Any = None) -> Any:
        """Return the saved tree at a path, with tensors on the meta device, or `default`."""
        if self.files is not None:
            return at(self._tree, path, default)
        # not nested: other tools have tensors "w" and "w.absmax" in one file
        name, start = joined(path), joined((*path, ""))
        below = {key.removeprefix(start): self._tree[key] for key in self.keys(path)}
        return self._tree.get(name, below or default)

    def verify(self, rank: int = 0, ranks: int = 1, digests: bool = True) -> None:
        """Raise ArgumentError if a file is missing, cut or altered; hashes every P-th file."""
        if self.files is None:
            return  # their headers have been read
        verify_files(self.folder, self.files, rank, ranks, digests)
        mine = {*sorted(self.files)[rank::ranks]}
        for tensor in self.tensors.values():
            for part in tensor.parts:
                if part.file in mine:
                    self._file(part.file).check(part.name, tensor.dtype, part.sizes)

    def read(self, key: str, boxes: Iterable[Box]) -> None:
        """Overwrite boxes of a tensor with saved elements; reads only these."""
        dtype, _, parts = self.tensors[key]
        for box in boxes:
            for part in parts:
                self._copy(part, box, dtype)

    def _copy(self, part: Part, box: Box, dtype: torch.dtype) -> None:
        """Copy the elements that a saved part and a box of the target have in common."""
        source, target, sizes = [], box.tensor, []
        for dim, (a, n, b) in enumerate(zip(part.offsets, part.sizes, box.offsets, strict=True)):
            low, high = max(a, b), min(a + n, b + target.shape[dim])
            if low >= high:
                return
            source.append(low - a)
            sizes.append(high - low)
            target = target.narrow(dim, low - b, high - low)
        target.copy_(self._file(part.file).read(part.name, dtype, source, sizes))


def _of_other_tools(path: Path) -> tuple[Path, list[str] | None]:
    """Return the folder of a checkpoint, and its files if another tool has written them."""
    if path.is_dir() and not (path / f"{KIND}.json").exists():
        here = [path / name for name in (_HUB_INDEX, "model.safetensors")]
        path = next((file for file in here if file.exists()), path)
    if path.suffix == ".safetensors":
        return path.parent, [path.name]
    if not path.name.endswith(".index.json"):
        return path, None
    with reading(path, damaged="is not an index with a weight_map"):
        names = sorted({str(name) for name in json.loads(path.read_text())["weight_map"].values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ArgumentError(f"{path} names {name!r}, which is not a file of its folder.")
    return path.parent, names


def _sizes(values: Iterable[Any]) -> Any:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes!r} are not sizes")
    return sizes
