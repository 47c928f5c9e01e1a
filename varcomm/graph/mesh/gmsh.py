"""Gmsh files in which some entities or cells have no physical group."""

from __future__ import annotations

import re
from typing import Any


def completed(content: bytes) -> bytes | None:
    """Return a file of Gmsh with group 0 for all that has no group; None for other files.

    meshio reads groups of all cells or of none. In Gmsh's files, 0 stands for no group.
    """
    head = re.match(rb"\$MeshFormat\s+(2\.\d|4\.1)\s+([01])\s+(\d)\s", content)
    if head is None:
        return None
    is_ascii, width = head[2] == b"0", int(head[3])
    name = b"Elements" if head[1].startswith(b"2") else b"Entities"
    found = re.search(rb"\$%b\r?\n(.*?)\$End%b" % (name, name), content, re.DOTALL)
    if found is None or (name == b"Elements" and not is_ascii):
        return None
    section = found[1]
    if name == b"Elements":
        section = b"\n".join(map(_with_two_tags, section.split(b"\n")))
    elif is_ascii:
        section = b" ".join(_with_groups(section.split(), 1, 1, 1)) + b"\n"
    else:
        order: Any = "little" if content[head.end() :][:1] == b"\x01" else "big"
        section = b"".join(_with_groups(section, 4, 8, width, order)) + b"\n"
    return content[: found.start(1)] + section + content[found.end(1) :]


def _with_two_tags(line: bytes) -> bytes:
    """Return a line of a cell: its id, kind, number of tags, tags and points."""
    words = line.split()
    if len(words) > 2 and int(words[2]) < 2:
        words[2 : 3 + int(words[2])] = [b"2", *words[3 : 3 + int(words[2])], b"0", b"0"][:3]
    return b" ".join(words)


def _with_groups(part: Any, tag: int, real: int, count: int, order: Any = "little") -> list[bytes]:
    """Return the entities with a group each: points, curves, surfaces and volumes.

    `part` is a list of words, or bytes. `tag`, `real` and `count` are lengths of its numbers.
    """
    place = 0
    found: list[bytes] = []

    def take(length: int) -> Any:
        nonlocal place
        place += length
        taken = part[place - length : place]
        found.extend(taken if isinstance(part, list) else [taken])
        return taken

    def number() -> int:
        taken = take(count)
        return int(taken[0]) if isinstance(part, list) else int.from_bytes(taken, order)

    for dim, entities in enumerate([number() for _ in range(4)]):
        for _ in range(entities):
            take(tag + real * (6 if dim else 3))
            groups = number()
            take(tag * groups)
            if not groups and isinstance(part, list):
                found[-1:] = [b"1", b"0"]
            elif not groups:
                found[-2:] = [(1).to_bytes(count, order), bytes(tag)]
            if dim:
                take(tag * number())
    return found
