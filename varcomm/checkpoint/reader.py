"""A checkpoint in a folder: what it has, whether its files are whole, and what is in them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_tensor_shard

from varcomm.checkpoint.boxes import chunks_of
from varcomm.checkpoint.manifest import (
    METADATA,
    Digest,
    Manifest,
    check_is_file,
    manifest_file,
    save_of,
)
from varcomm.checkpoint.nested import Keys, Number
from varcomm.checkpoint.unpickle import metadata_of
from varcomm.errors import ArgumentError

__all__ = ["Checkpoint"]

_AGAIN = "Take another checkpoint; nothing has been loaded."


@dataclass(frozen=True)
class Checkpoint:
    """What is in a folder, as its ``.metadata`` tells.

    Attributes
    ----------
    folder : Path
    content : bytes
        Of ``.metadata``.
    metadata : Metadata
    manifest : Manifest or None
        What the files should be; None where torch alone has written them.
    """

    folder: Path
    content: bytes
    metadata: Metadata
    manifest: Manifest | None

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read what a folder has.

        Raises
        ------
        ArgumentError
            If there is no checkpoint, or what tells about it is damaged or names what would have to
            be run.
        """
        path = folder / METADATA
        if not folder.exists():
            raise ArgumentError(f"there is no folder {folder}.")
        try:
            check_is_file(path)
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ArgumentError(
                f"{folder} has no checkpoint in it: there is no {path.name}."
            ) from error
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error}.") from error
        try:
            metadata = metadata_of(content)
            files = {place.relative_path for place in metadata.storage_data.values()}
            save = save_of(metadata.storage_meta.save_id, files)  # type: ignore[union-attr]
        except ArgumentError as error:
            raise ArgumentError(f"{path} cannot be read: {error}") from error
        manifest = None if save is None else Manifest.read(folder / manifest_file(save))
        if manifest is not None and manifest.metadata != Digest.of(content):
            raise ArgumentError(f"{path} is not what was written: it is damaged. {_AGAIN}")
        return cls(folder, content, metadata, manifest)

    @cached_property
    def paths(self) -> dict[str, Keys]:
        """Where in the state each key is, in the order of the state."""
        known: Mapping[str, Keys] = self.metadata.planner_data or {}
        keys = self.metadata.state_dict_metadata
        order = dict.fromkeys([*(key for key in known if key in keys), *keys])
        found = {key: known.get(key, (key,)) for key in order}
        for key, places in (self.manifest.numbers if self.manifest is not None else {}).items():
            if key not in found:
                raise ArgumentError(f"{self.folder}: there is no {key!r}. {_AGAIN}")
            found[key] = tuple(
                Number(name) if place in places else name for place, name in enumerate(found[key])
            )
        return found

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Which keys are tensors, and what these are; all others are plain values."""
        entries = self.metadata.state_dict_metadata.items()
        return {key: entry for key, entry in entries if isinstance(entry, TensorStorageMetadata)}

    def like(self, key: str, device: str) -> torch.Tensor:
        """Return a tensor like a saved one, whose contents are anything."""
        entry = self.tensors[key]
        return torch.empty(entry.size, dtype=entry.properties.dtype, device=device)

    @cached_property
    def files(self) -> dict[str, int]:
        """How long each data file must be at least, by name."""
        found: dict[str, int] = {}
        for place in self.metadata.storage_data.values():
            end = place.offset + place.length
            found[place.relative_path] = max(end, found.get(place.relative_path, 0))
        return dict(sorted(found.items()))

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare files with what was written: the sizes of all, the digests of every so many.

        Raises
        ------
        ArgumentError
            If a file is missing, too short, or has been altered.
        """
        for name, size in self.files.items():
            path = self.folder / name
            try:
                check_is_file(path)
                found = path.stat().st_size
            except FileNotFoundError as error:
                raise ArgumentError(f"{path} is missing: {error}. {_AGAIN}") from error
            except OSError as error:
                raise ArgumentError(f"{path} cannot be read: {error}. {_AGAIN}") from error
            if self.manifest is not None and name not in self.manifest.files:
                raise ArgumentError(f"{path} is none of the files that were written. {_AGAIN}")
            exact = None if self.manifest is None else self.manifest.files[name].size
            if found < size or exact not in (None, found):
                raise ArgumentError(
                    f"{path} has been cut or changed: it has {found} bytes, of "
                    f"{size if exact is None else exact}. {_AGAIN}"
                )
        self._check_cover()
        if self.manifest is not None:
            for name in list(self.files)[rank::ranks]:
                if Digest.of_file(self.folder / name) != self.manifest.files[name]:
                    raise ArgumentError(
                        f"{self.folder / name} has been altered: its SHA-256 is not that of what "
                        f"was written. {_AGAIN}"
                    )

    def _check_cover(self) -> None:
        """Raise ArgumentError if the saved boxes of a tensor leave gaps, or are in no file."""
        for key in self.paths:
            entry = self.tensors.get(key)
            if entry is None:
                known = MetadataIndex(key) in self.metadata.storage_data
            else:
                boxes = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
                known = sum(prod(box.sizes) for box in boxes) == prod(entry.size) and all(
                    self._has_room(key, box, entry.properties.dtype) for box in boxes
                )
            if not known:
                raise ArgumentError(
                    f"{self.folder / METADATA} does not tell where all of {key!r} is. {_AGAIN}"
                )

    def _has_room(self, key: str, box: ChunkStorageMetadata, dtype: torch.dtype) -> bool:
        """Tell whether a saved box is in a file, in no fewer bytes than it has."""
        place = self.metadata.storage_data.get(MetadataIndex(key, box.offsets))
        if place is None:
            return False
        return bool(place.transform_descriptors) or prod(box.sizes) * dtype.itemsize <= place.length

    def values(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return plain values, by key."""
        return {key: self._loaded(MetadataIndex(key)) for key in keys}

    def read(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Overwrite tensors, or of one that is sharded this rank's boxes, by what was saved.

        What has been saved in one piece is read once, however many boxes it goes into.
        """
        wanted: dict[MetadataIndex, list[ReadItem]] = {}
        for key, target in targets.items():
            boxes = chunks_of(target)
            for item in create_read_items_for_chunk_list(key, self.tensors[key], boxes):
                wanted.setdefault(item.storage_index, []).append(item)
        for index in sorted(wanted, key=self._place):
            saved = self._loaded(index)
            self._check(index, saved)
            for item in wanted[index]:
                target = find_tensor_shard(targets[index.fqn], item.dest_index).detach()
                part = _narrowed(saved, item.storage_offsets, item.lengths)
                _narrowed(target, item.dest_offsets, item.lengths).copy_(part)

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        place = self.metadata.storage_data[index]
        return place.relative_path, place.offset

    def _loaded(self, index: MetadataIndex) -> Any:
        """Return what torch.save has written, as far as no pickle need be run for it."""
        place = self.metadata.storage_data[index]
        with (self.folder / place.relative_path).open("rb") as file:
            part = io.BufferedReader(_Slice(file, place.offset, place.length))
            for descriptor in place.transform_descriptors or ():  # compressed, say
                raise ArgumentError(
                    f"{self.folder}: {index.fqn!r} has gone through {descriptor!r}, which is not "
                    "undone here. Save it without extensions of torch's."
                )
            try:
                _check_lengths(part, place.length)
                return torch.load(part, map_location="cpu", weights_only=True)
            except zipfile.BadZipFile as error:
                raise ArgumentError(
                    f"{self.folder}: {index.fqn!r} is damaged: {error}. {_AGAIN}"
                ) from error
            except Exception as error:
                raise ArgumentError(
                    f"{self.folder}: {index.fqn!r} cannot be read without running what is in the "
                    f"file, which has not been done: {error}"
                ) from error

    def _check(self, index: MetadataIndex, saved: Any) -> None:
        entry = self.tensors[index.fqn]
        expected = entry.chunks[index.index or 0].sizes
        found = (saved.dtype, saved.shape) if isinstance(saved, torch.Tensor) else type(saved)
        if found != (entry.properties.dtype, expected):
            raise ArgumentError(
                f"{self.folder}: {METADATA} tells of {index.fqn!r} that it is {expected} of "
                f"{entry.properties.dtype}, and the data file has {found}."
            )


def _narrowed(tensor: torch.Tensor, offsets: Iterable[int], lengths: Iterable[int]) -> torch.Tensor:
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


class _Slice(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._place = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = (0, self._place, self._length)[whence]
        self._place = max(0, start + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._offset + self._place)
        content = self._file.read(max(0, min(len(buffer), self._length - self._place)))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)


def _check_lengths(part: IO[bytes], length: int) -> None:
    """Raise BadZipFile if an archive tells of more than it has; torch would make room for it."""
    with zipfile.ZipFile(part) as archive:
        if sum(member.file_size for member in archive.infolist()) > length:
            raise zipfile.BadZipFile("it tells of more than there is in it")
    part.seek(0)
