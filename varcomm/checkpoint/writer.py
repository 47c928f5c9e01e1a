"""Data files of a save, and the one stroke by which it takes the place of the earlier one.

In the folder of a checkpoint all files of a save have names of their own but ``.metadata``, which
names them. They are written and synced to the disk first; then ``.metadata`` is replaced, which the
file system does wholly or not at all; then the files that it named before are removed. Whatever
moment a save ends at, ``.metadata`` names files that are whole.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner import SavePlanner as Planner

from varcomm.checkpoint.agreement import Agreed
from varcomm.checkpoint.manifest import METADATA, Digest, Manifest, data_file, manifest_file
from varcomm.errors import ArgumentError
from varcomm.transport.serialization import travels

__all__ = ["Written", "commit", "discard", "is_committed", "write"]

# What torch or varcomm leaves in a folder: data, manifests, and what was to become .metadata.
_OURS = re.compile(
    r"__\d+_(?:[0-9a-f]{32}_)?\d+\.distcp|varcomm-[0-9a-f]{32}\.json"
    r"|\.metadata\.(?:tmp|varcomm-[0-9a-f]{32})"
)


@travels
@dataclass(frozen=True)
class Written:
    """What one rank has written: its files, and where in them each item of its plan is."""

    files: Mapping[str, Digest]
    places: Sequence[tuple[str, int, int]]


def write(folder: Path, save: str, rank: int, plan: SavePlan, planner: Planner) -> Written:
    """Write what `plan` has for a rank, and sync it to the disk."""
    if not plan.items:
        return Written({}, [])
    folder.mkdir(parents=True, exist_ok=True)
    disk = _Disk()
    writer = FileSystemWriter(folder, sync_files=False)  # the disk does it, whatever else there is
    writer.fs = disk
    prefixed = replace(plan, storage_data=_Prefix(data_file(save, rank)))
    try:
        results = writer.write_data(prefixed, planner).value()
    except Exception as error:
        # torch.save says something else then
        raise (disk.failure or error) from error
    places = {result.index: result.storage_data for result in results}
    found = [places[item.index] for item in plan.items]
    return Written(
        disk.digests, [(place.relative_path, place.offset, place.length) for place in found]
    )


def commit(folder: Path, save: str, found: Agreed, written: Sequence[Written]) -> None:
    """Make what all ranks have written the checkpoint in the folder; for one rank to call.

    If it raises, :func:`is_committed` tells whether the new checkpoint is there all the same.
    """
    metadata = found.metadata
    metadata.storage_meta = StorageMeta(save_id=save)
    metadata.storage_data = {
        item.index: _StorageInfo(*place)
        for plan, own in zip(found.plans, written, strict=True)
        for item, place in zip(plan.items, own.places, strict=True)
    }
    if hasattr(filesystem, "CURRENT_DCP_VERSION"):
        metadata.version = filesystem.CURRENT_DCP_VERSION
    content = pickle.dumps(metadata)
    files = {name: digest for own in written for name, digest in own.files.items()}
    coming = folder / f"{METADATA}.{save}"
    folder.mkdir(parents=True, exist_ok=True)
    _check_there(folder, files)
    manifest = Manifest(Digest.of(content), files, found.numbers)
    _write(folder / manifest_file(save), manifest.text().encode())
    _write(coming, content)
    _sync(folder)
    os.replace(coming, folder / METADATA)
    _sync(folder)
    _sync(folder.parent)
    _sweep(folder, {*files, manifest_file(save)})


def is_committed(folder: Path, save: str) -> bool:
    """Tell whether the checkpoint in a folder is that of a save."""
    try:
        return save.encode() in (folder / METADATA).read_bytes()
    except OSError:
        return False


def discard(folder: Path, save: str, rank: int) -> None:
    """Remove what a rank has written in a save that has come to nothing."""
    for path in folder.glob(f"{data_file(save, rank)}*"):
        _remove(path)
    if rank == 0:
        for name in (manifest_file(save), f"{METADATA}.{save}"):
            _remove(folder / name)


def _check_there(folder: Path, files: Mapping[str, Digest]) -> None:
    for name, digest in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != digest.size:
            raise ArgumentError(
                f"{name}, which another rank has written, is not there as it was written. All "
                "ranks must write to one folder: on several machines, one of a file system that "
                "they share."
            )


def _sweep(folder: Path, named: set[str]) -> None:
    """Remove what no checkpoint names any more, and what saves that were killed have left."""
    for path in folder.iterdir():
        if _OURS.fullmatch(path.name) and path.name not in named:
            _remove(path)


def _remove(path: Path) -> None:
    # where it cannot be removed it takes up room and does no harm; the next save tries again
    with suppress(OSError):
        path.unlink()


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Let an error of the system tell of which file it is; the folder is told of by who saves."""
    try:
        yield
    except OSError as error:
        error.filename = path.name
        raise


def _write(path: Path, content: bytes) -> None:
    with _named(path), path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Let the names in a folder outlast a loss of power."""
    with _named(folder):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class _Prefix:
    """How the names of the files begin that torch writes for a plan."""

    prefix: str


class _Disk(FileSystem):
    """The file system, which remembers what is written and why it could not be."""

    def __init__(self) -> None:
        self.digests: dict[str, Digest] = {}
        self.failure: OSError | None = None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a new file, and take its digest down when it is closed."""
        try:
            with _named(Path(path)), Path(path).open("xb") as raw:
                stream = _Hashed(raw, self)
                yield stream
                raw.flush()
                os.fsync(raw.fileno())
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.digests[Path(path).name] = Digest(stream.size, stream.sha256.hexdigest())


class _Hashed:
    """A file that is written from its beginning to its end, with the digest of what is in it."""

    def __init__(self, raw: Any, disk: _Disk) -> None:
        self._raw, self._disk = raw, disk
        self.sha256, self.size = hashlib.sha256(), 0

    def write(self, content: Any) -> int:
        try:
            with _named(Path(self._raw.name)):
                self._raw.write(content)
        except OSError as error:
            self._disk.failure = error
            raise
        self.sha256.update(content)
        length = memoryview(content).nbytes
        self.size += length
        return length

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        self._raw.flush()

    def fileno(self) -> int:
        return self._raw.fileno()  # type: ignore[no-any-return]

    def close(self) -> None:
        """Leave the file to who has opened it."""
