"""Folders of safetensors files with one JSON index, written so that a crash leaves them whole.

A save writes its files into a new subfolder. Then one rename replaces the index, which names these
files with their sizes and XXH3 digests. Then the subfolder of the earlier save is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from xxhash import xxh3_128

from varcomm.errors import ArgumentError
from varcomm.sharding.sharded import check_inside
from varcomm.transport.engine import as_bytes

# Size and digest (XXH3, 128 bits) of each file, by its path in the folder.
Files = Mapping[str, tuple[int, str]]

_VERSION = 4
_HASHERS = 4  # threads that verify files
_AGAIN = "Use another copy; nothing has been loaded."


def new_token() -> str:
    """Return 16 random hexadecimal digits, the name of a save."""
    return os.urandom(8).hex()


class FolderSave:
    """One save into a folder, an absolute path, that may hold an earlier one.

    The index is ``<kind>.json``, and files are ``<kind>-<token>/rank-00000.safetensors``, with one
    :func:`new_token` for all ranks.
    """

    def __init__(self, folder: Path, kind: str, token: str) -> None:
        self.folder, self.kind, self.name = folder, kind, f"{kind}-{token}"
        self.index = folder / f"{kind}.json"
        self._coming = folder / f".{self.name}.json"
        self._is_new = not folder.exists()

    def write(self, rank: int, tensors: Mapping[str, torch.Tensor]) -> str:
        """Write and sync the file of `rank`; return its digest, or "" if there are no tensors."""
        if not tensors:
            return ""
        path = self.folder / self._file(rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_tensors(path, tensors)

    def commit(self, content: Mapping[str, Any], digests: Sequence[str]) -> None:
        """Make the files of all ranks the content of the folder; for one rank to call.

        `digests` are the results of :meth:`write` in rank order.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        files = {}
        for name, digest in ((self._file(rank), one) for rank, one in enumerate(digests) if one):
            path = self.folder / name
            if not path.is_file():
                raise ArgumentError(
                    f"{name}, which another rank has written, is not in {self.folder}. All ranks "
                    "must write to one folder: on several machines, use a shared file system."
                )
            files[name] = {"bytes": path.stat().st_size, "xxh3_128": digest}
        head = {"format": f"varcomm {self.kind}", "version": _VERSION, "save": self.name}
        index = {**head, **content, "files": files}
        self._coming.write_text(json.dumps({**index, "digest": digest_of_json(index)}) + "\n")
        _sync(self._coming)
        if files:
            _sync(self.folder / self.name)
        _sync(self.folder)
        os.replace(self._coming, self.index)
        _sync(self.folder)
        _sync(self.folder.parent)
        for path in self.folder.iterdir():
            if is_save_name(path.name, self.kind) and path.name != self.name:
                _remove(path)

    def discard(self) -> None:
        """Remove the files of a save that failed on all ranks, unless its index is in place."""
        with suppress(OSError):
            if f'"save": "{self.name}"'.encode() in self.index.read_bytes()[:200]:
                return
        _remove(self.folder / self.name)
        _remove(self._coming)
        with suppress(OSError):  # it has other files
            if self._is_new:
                self.folder.rmdir()

    def _file(self, rank: int) -> str:
        return f"{self.name}/rank-{rank:05}.safetensors"


def _remove(path: Path) -> None:
    """Remove a file or a folder; one that stays uses space, and the next save tries again."""
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def is_save_name(name: str, kind: str) -> bool:
    """Return whether a name is the name of a save's subfolder, or of an unfinished index."""
    return bool(re.fullmatch(rf"{kind}-[0-9a-f]{{16}}|\.{kind}-[0-9a-f]{{16}}\.json", name))


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> str:
    """Write a safetensors file, sync it, and return its digest.

    Complex tensors are stored as pairs of real numbers.
    """
    stored, header, start = [], {}, 0
    # as the package orders them, so that each tensor is aligned to its dtype
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        value = tensor.detach().cpu().resolve_conj().resolve_neg()
        value = (torch.view_as_real(value) if value.is_complex() else value).contiguous()
        place = {"dtype": _stored_dtype(value.dtype), "shape": list(value.shape)}
        header[name] = {**place, "data_offsets": [start, start + value.nbytes]}
        start += value.nbytes
        if value.numel():
            stored.append(as_bytes(value).numpy().data)
    if "__metadata__" in header:
        raise ArgumentError(
            "safetensors files cannot hold a tensor named '__metadata__'. Rename it in the state."
        )
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    parts = [memoryview(len(text).to_bytes(8, "little") + text), *stored]
    digest = xxh3_128()
    try:
        with path.open("wb") as file:
            for part in parts:
                file.write(part)
                digest.update(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    return digest.hexdigest()


@cache
def _stored_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in safetensors files, or raise ArgumentError."""
    try:
        content = serialized({"x": torch.empty((0, 2), dtype=dtype)})
        entry = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["x"]
    except (KeyError, SafetensorError, ValueError) as error:
        raise ArgumentError(f"safetensors files cannot hold {dtype}: {error}") from error
    if entry["shape"] != [0, 2]:
        raise ArgumentError(f"safetensors files hold {dtype} in another shape. View it as uint8.")
    return str(entry["dtype"])


@contextmanager
def reading(path: Path, missing: str = "", damaged: str = "is damaged") -> Iterator[None]:
    """Raise an ArgumentError that names a file if it cannot be read; a pipe may never end."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise OSError(f"{path.name} is not a regular file")
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ArgumentError(missing or f"{path} is missing. {_AGAIN}") from error
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error}. {_AGAIN}") from error
    except Exception as error:  # as many kinds as there are malformed files
        raise ArgumentError(f"{path} {damaged}: {error}. {_AGAIN}") from error


def is_index(path: Path, kind: str) -> bool:
    """Return whether a file begins as an index does; the rest may be damaged."""
    start = json.dumps({"format": f"varcomm {kind}"}).removesuffix("}")
    try:
        with reading(path), path.open() as file:
            return file.read(len(start)) == start
    except ArgumentError:
        return False


def read_index(folder: Path, kind: str) -> tuple[dict[str, Any], Files]:
    """Return the content of an index and its files, or raise ArgumentError."""
    path = folder / f"{kind}.json"
    none = f"{folder} has no {path.name}" if folder.exists() else f"there is no {folder}"
    with reading(path, missing=f"{none}: nothing is saved there."):
        content = json.loads(path.read_text())
        head = f"{content['format']} of version {content['version']}"
    if head != f"varcomm {kind} of version {_VERSION}":
        raise ArgumentError(
            f"{path} is a {head}; this varcomm reads a varcomm {kind} of version {_VERSION}. "
            "Load it with the varcomm that has saved it, and save it again."
        )
    if content.pop("digest", None) != digest_of_json(content):
        raise ArgumentError(f"{path} is damaged or has been altered. {_AGAIN}")
    save, files = str(content.pop("save", "")), content.pop("files", None)
    with reading(path):
        found = {
            name: (int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in files.items()
        }
    for name in found:
        within, _, file = name.partition("/")
        named = re.fullmatch(r"rank-\d{5,}\.safetensors", file)
        if not named or within != save or not is_save_name(save, kind):
            raise ArgumentError(f"{path} names {name!r}, which is not a file of its save.")
    return content, found


def verify_files(
    folder: Path, files: Files, rank: int = 0, ranks: int = 1, digests: bool = True
) -> None:
    """Raise ArgumentError if a file is missing or has changed; hashes every P-th file."""

    def verify(number: int, name: str) -> None:
        path, (size, written) = folder / name, files[name]
        with reading(path):
            found, digest = path.stat().st_size, written
            if found == size and number % ranks == rank and digests:
                with path.open("rb", buffering=0) as file:
                    digest = hashlib.file_digest(file, xxh3_128).hexdigest()
        if (found, digest) != (size, written):
            differs = "its digest differs" if found == size else f"{found} bytes in place of {size}"
            raise ArgumentError(f"{path} is not the file that was written: {differs}. {_AGAIN}")

    with ThreadPoolExecutor(_HASHERS, "varcomm.digest") as pool:
        for _ in pool.map(verify, range(len(files)), sorted(files)):
            pass  # raises the error of the first file


class TensorFile:
    """A safetensors file, mapped into memory; ArgumentError if it is missing or damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path):
            self._file = safe_open(path, framework="pt", device="cpu")
            self.names: list[str] = list(self._file.keys())

    def stored(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor in the file; complex ones are pairs of numbers."""
        part = self._part(name)
        shape = tuple(part.get_shape())
        return part[tuple(slice(0, 0) for _ in shape)].dtype, shape

    def check(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Raise ArgumentError unless the tensor has this dtype and shape."""
        stored, shape = self.stored(name), tuple(shape)
        pairs = dtype.is_complex and not stored[0].is_complex
        if stored != ((dtype.to_real(), (*shape, 2)) if pairs else (dtype, shape)):
            raise ArgumentError(
                f"{self.path}: {name!r} is {stored[0]} of shape {stored[1]}; the index has "
                f"{dtype} of shape {shape}."
            )

    def read(
        self, name: str, dtype: torch.dtype, offsets: Sequence[int], sizes: Sequence[int]
    ) -> torch.Tensor:
        """Return a box; only its part of the file is read."""
        box = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
        value: torch.Tensor = self._part(name)[box]
        return value if value.dtype == dtype else torch.view_as_complex(value)

    def _part(self, name: str) -> Any:
        try:
            return self._file.get_slice(name)
        except SafetensorError as error:
            raise ArgumentError(f"{self.path} has no tensor {name!r}. {_AGAIN}") from error


def check_cover(key: str, shape: Sequence[int], boxes: Sequence[Sequence[Sequence[int]]]) -> None:
    """Raise ArgumentError unless boxes, each as offsets and sizes, cover a tensor exactly once."""
    fix = "Boxes of all ranks must cover a tensor, each element once."
    for offsets, sizes in boxes:
        check_inside(f"{key!r}: a box", offsets, sizes, shape)
    volume, total = sum(prod(sizes) for _, sizes in boxes), prod(shape)
    if volume != total:
        raise ArgumentError(
            f"the boxes of {key!r} have {volume} elements, and the tensor of shape {tuple(shape)} "
            f"has {total}: there are gaps or overlaps. {fix}"
        )
    if not shape:
        return
    filled = [box for box in boxes if prod(box[1])]
    # along the dimension with most starts few boxes stand side by side
    along = max(range(len(shape)), key=lambda dim: len({offsets[dim] for offsets, _ in filled}))
    filled.sort(key=lambda box: box[0][along])
    for number, (offsets, sizes) in enumerate(filled):
        for others, lengths in filled[number + 1 :]:
            if others[along] >= offsets[along] + sizes[along]:
                break
            ends = zip(offsets, sizes, others, lengths, strict=True)
            if all(a < b + m and b < a + n for a, n, b, m in ends):
                places = f"{tuple(offsets)} and {tuple(others)}"
                raise ArgumentError(f"{key!r}: boxes at {places} overlap. {fix}")


def digest_of_json(content: Any) -> str:
    """Return the digest of plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
