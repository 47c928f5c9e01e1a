"""What tells whether the files of a checkpoint are those that were written.

``.metadata`` is replaced at one stroke and names its save; beside it lies the manifest of that
save, in JSON, with size and SHA-256 of each data file and of ``.metadata`` itself, and with what
torch's format of keys does not tell.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from varcomm.errors import ArgumentError
from varcomm.transport.serialization import travels

__all__ = [
    "METADATA",
    "Digest",
    "Manifest",
    "check_is_file",
    "data_file",
    "manifest_file",
    "new_save",
    "save_of",
]

METADATA = ".metadata"

_FORMAT, _VERSION = "varcomm checkpoint", 1
_SAVE = re.compile(r"varcomm-([0-9a-f]{32})")
_DATA = re.compile(r"__\d+_([0-9a-f]{32})_\d+\.distcp")
_BLOCK = 1 << 20


def check_is_file(path: Path) -> None:
    """Raise OSError if there is no file, or what never ends: a pipe or a device, also by a link."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{path.name} is no file")


def new_save(token: str) -> str:
    """Return the name of a save, of 32 random hexadecimal digits."""
    return f"varcomm-{token}"


def data_file(save: str, rank: int) -> str:
    """Return how what a rank writes in a save begins; torch adds a number and a suffix."""
    return f"__{rank}_{save.removeprefix('varcomm-')}_"


def manifest_file(save: str) -> str:
    """Return what the manifest of a save is called."""
    return f"{save}.json"


def save_of(save_id: str | None, files: set[str]) -> str | None:
    """Return which save of varcomm a ``.metadata`` belongs to, or None if torch alone wrote it.

    Raises
    ------
    ArgumentError
        If it names data files of another save than its own.
    """
    found = {match[1] for name in files if (match := _DATA.fullmatch(name))}
    own = _SAVE.fullmatch(save_id or "")
    if found - ({own[1]} if own else set()):
        raise ArgumentError(f"{METADATA} has been altered: it names files of another save.")
    return own[0] if own else None


@travels
@dataclass(frozen=True)
class Digest:
    """Size and SHA-256 of what is in a file."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Self:
        """Return that of some bytes."""
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def of_file(cls, path: Path) -> Self:
        """Return that of a file, of which a part at a time is read."""
        found, size = hashlib.sha256(), 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                found.update(block)
                size += len(block)
        return cls(size, found.hexdigest())


@dataclass(frozen=True)
class Manifest:
    """Digests of the files of one save.

    Attributes
    ----------
    metadata : Digest
    files : mapping of str to Digest
        Of the data files, by name.
    numbers : mapping of str to list of int
        By key, where in its path there are keys of dicts that are numbers and no texts.
    """

    metadata: Digest
    files: Mapping[str, Digest]
    numbers: Mapping[str, list[int]]

    def text(self) -> str:
        """Return it as the text of a file."""
        content = self._content()
        return json.dumps({**content, "digest": _digest(content)}, indent=1) + "\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return what a file has, or raise ArgumentError."""
        try:
            check_is_file(path)
            content = json.loads(path.read_text())
            if not isinstance(content, dict):
                raise ValueError("it is none of varcomm's")
            digest = content.pop("digest", None)
            if digest != _digest(content):
                raise ValueError("it is not what was written")
            if (content["format"], content["version"]) != (_FORMAT, _VERSION):
                raise ArgumentError(
                    f"{path} is of {content['format']!r}, version {content['version']}; this "
                    f"varcomm reads version {_VERSION}."
                )
            files = {name: Digest(**digest) for name, digest in content["files"].items()}
            numbers = {key: [*map(int, places)] for key, places in content["numbers"].items()}
            return cls(Digest(**content["metadata"]), files, numbers)
        except FileNotFoundError as error:
            raise ArgumentError(
                f"{path.parent} lacks {path.name}, so nothing tells whether its files are whole."
            ) from error
        except ArgumentError:
            raise
        except OSError as error:
            raise ArgumentError(f"{path} cannot be read: {error}.") from error
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ArgumentError(f"{path} is damaged: {error}.") from error

    def _content(self) -> dict[str, Any]:
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "metadata": vars(self.metadata),
            "files": {name: vars(digest) for name, digest in sorted(self.files.items())},
            "numbers": dict(self.numbers),
        }


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
