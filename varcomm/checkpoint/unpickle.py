"""What torch writes into ``.metadata`` is a pickle: read here without running what it says.

A pickle is a program. It can name any function of any module, and loading it calls them. This one
may name only the classes that the metadata of a checkpoint is made of, and even of these gets
stand-ins, made anew for each file, so that it cannot alter the classes themselves.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from varcomm.errors import ArgumentError

__all__ = ["metadata_of"]

_CLASSES = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _StorageInfo,
)

# What keeps an object at a place with a number, of which there are as many as objects at most.
_PLACES = {"PUT", "BINPUT", "LONG_BINPUT"}

# What makes room before it is known that there is something for it; metadata needs none of it.
_ROOM = {"BYTEARRAY8", "NEXT_BUFFER", "READONLY_BUFFER"}


def metadata_of(content: bytes) -> Metadata:
    """Return the metadata in the bytes of a ``.metadata`` file.

    Raises
    ------
    ArgumentError
        If they name something else than metadata is made of, which is then not called; or if they
        are damaged.
    """
    unpickler = _Unpickler(io.BytesIO(content))
    try:
        _check_lengths(content)
        return _metadata(unpickler.load(), unpickler.stand_ins)
    except ArgumentError:
        raise
    except Exception as error:  # whatever a byte that has been altered leads to
        raise ArgumentError(f"it is damaged: {type(error).__name__}: {error}") from error


def _check_lengths(content: bytes) -> None:
    """Raise ValueError if a pickle asks for more room than it fills; an unpickler would make it."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
        if opcode.name in _PLACES and int(argument or 0) > count:
            raise ValueError(f"an object is to be kept at place {argument}")
        if opcode.name in _ROOM:
            raise ValueError(f"{opcode.name} is asked for")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.stand_ins: dict[type, type] = {
            cls: type(cls.__name__, (_StandIn,), {}) for cls in _CLASSES
        }
        named = {(cls.__module__, cls.__name__): self.stand_ins[cls] for cls in _CLASSES}
        self.allowed: Mapping[tuple[str, str], Callable[..., Any]] = {
            **named,
            ("torch", "Size"): lambda sizes: tuple(sizes),
            ("torch.serialization", "_get_layout"): lambda name: name,
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): lambda n: n,
            ("pathlib", "PosixPath"): lambda *parts: str(PurePosixPath(*parts)),
            ("pathlib._local", "PosixPath"): lambda *parts: str(PurePosixPath(*parts)),
        }

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands in for one of the few names, or raise ArgumentError."""
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in self.allowed:
            raise ArgumentError(
                f"it asks for {module}.{name}, which no checkpoint needs. Nothing has been called; "
                "do not trust where this file comes from."
            )
        return self.allowed[module, name]


class _StandIn:
    """An object of the metadata, as the file has it."""

    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Made:
    """Makes torch's own objects of those that stand in for them; whatever does not fit raises."""

    def __init__(self, stand_ins: Mapping[type, type]) -> None:
        self._stand_ins = stand_ins

    def state(self, found: Any, cls: type) -> Any:
        if type(found) is not self._stand_ins[cls]:
            raise TypeError(f"a {cls.__name__} is expected, and there is a {type(found).__name__}")
        return found.state or {}  # type: ignore[attr-defined]

    def tensor(self, found: Any) -> TensorStorageMetadata:
        state = self.state(found, TensorStorageMetadata)
        dtype = self.state(state["properties"], TensorProperties)[0]
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{dtype!r} is no dtype")
        chunks = [self.state(chunk, ChunkStorageMetadata) for chunk in state["chunks"]]
        return TensorStorageMetadata(
            TensorProperties(dtype=dtype),
            _size(state["size"]),
            [ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in chunks],
        )

    def entry(self, found: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if type(found) is self._stand_ins[BytesStorageMetadata]:
            return BytesStorageMetadata()
        return self.tensor(found)

    def index(self, found: Any) -> MetadataIndex:
        state = self.state(found, MetadataIndex)
        offset = state.get("offset")
        return MetadataIndex(_text(state["fqn"]), None if offset is None else _size(offset))

    def place(self, found: Any) -> _StorageInfo:
        state = self.state(found, _StorageInfo)
        name = _text(state["relative_path"])
        if "/" in name or "\\" in name or name.startswith("."):
            raise ArgumentError(f"it points to {name!r}, which is no data file of the folder.")
        offset, length = _size((state["offset"], state["length"]))
        descriptors = state.get("transform_descriptors")
        return _StorageInfo(name, offset, length, descriptors and [*map(_text, descriptors)])

    def paths(self, found: Any) -> dict[str, tuple[str | int, ...]] | None:
        if found is None:
            return None
        return {
            _text(fqn): tuple(item if type(item) is int else _text(item) for item in path)
            for fqn, path in found.items()
        }


def _metadata(found: Any, stand_ins: Mapping[type, type]) -> Metadata:
    made = _Made(stand_ins)
    state = made.state(found, Metadata)
    meta = state.get("storage_meta")
    save_id = None if meta is None else made.state(meta, StorageMeta).get("save_id")
    return Metadata(
        {_text(fqn): made.entry(entry) for fqn, entry in state["state_dict_metadata"].items()},
        made.paths(state.get("planner_data")),
        {made.index(index): made.place(place) for index, place in state["storage_data"].items()},
        StorageMeta(save_id=None if save_id is None else _text(save_id)),
    )


def _size(found: Any) -> torch.Size:
    if not isinstance(found, tuple) or any(type(n) is not int or n < 0 for n in found):
        raise TypeError(f"{found!r} are no sizes")
    return torch.Size(found)


def _text(found: Any) -> str:
    if not isinstance(found, str):
        raise TypeError(f"{found!r} is no text")
    return found
