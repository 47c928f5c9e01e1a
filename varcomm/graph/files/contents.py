"""The files of a saved partition, looked at before anything is made of them; no communication."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from varcomm.graph.files.archive import read_arrays, read_manifest
from varcomm.graph.files.outline import Array, Arrays, Outline
from varcomm.graph.files.staging import WHOLE, part_file

__all__ = ["outline_of", "read_part", "read_whole"]


def outline_of(folder: Path) -> Outline:
    """Return what is in a folder, or raise ArgumentError."""
    return Outline.read(read_manifest(folder))


def read_whole(folder: Path, outline: Outline) -> Arrays:
    """Return what belongs to the graph as a whole, if its digest is right."""
    whole = _read(folder / WHOLE, outline.whole, outline.digests[0])
    outline.check_whole(whole)
    return whole


def read_part(folder: Path, outline: Outline, rank: int) -> Arrays:
    """Return what the rank has saved, if its digest is right and it fits the rest."""
    part = _read(folder / part_file(rank), outline.part, outline.digests[rank + 1])
    outline.check_part(part, rank)
    return part


def _read(path: Path, kinds: Mapping[str, Array], digest: str) -> Arrays:
    return read_arrays(path, {name: array.dtype for name, array in kinds.items()}, digest)
