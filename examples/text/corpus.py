"""A text that every Python installation has, its docstrings, and a tokenizer."""

import importlib
import inspect
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import ModuleType

import torch

MODULES = """
argparse ast asyncio base64 bisect calendar collections configparser contextlib copy csv dataclasses
datetime difflib doctest email enum fractions functools gettext hashlib heapq html http.client
http.cookiejar inspect io ipaddress json logging mailbox operator optparse os pathlib pickle
pickletools pprint queue random re selectors shelve shutil smtplib socket socketserver statistics
string subprocess tarfile tempfile textwrap threading timeit tokenize traceback types unittest
unittest.mock urllib.parse urllib.request uuid weakref xml.dom.minidom xml.etree.ElementTree zipfile
"""

CHARACTERS = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
FIRST_PAIR = 0xE000  # the first of Unicode's private characters, which stand for pairs


def docstrings(module: ModuleType) -> Iterator[str]:
    """Yield the docstrings of a module, its functions, its classes and their methods."""
    found = [module]
    for name, thing in sorted(vars(module).items()):
        if name.startswith("_") or getattr(thing, "__module__", None) != module.__name__:
            continue
        if inspect.isroutine(thing) or inspect.isclass(thing):
            found.append(thing)
        if inspect.isclass(thing):
            methods = sorted(vars(thing).items())
            found += [f for n, f in methods if n[0] != "_" and inspect.isroutine(f)]
    for thing in found:
        if isinstance(thing.__doc__, str):
            yield inspect.cleandoc(thing.__doc__)


def text() -> str:
    """Return all docstrings, each once; about 500,000 characters."""
    said = (doc for name in MODULES.split() for doc in docstrings(importlib.import_module(name)))
    return re.sub(rf"[^{re.escape(CHARACTERS)}]", "", "\n\n\n".join(dict.fromkeys(said)))


class Vocabulary:
    """Tokens: characters, and the most frequent pairs of tokens in a text.

    This is byte-pair encoding (R. Sennrich, B. Haddow and A. Birch, "Neural machine translation of
    rare words with subword units", 2016, https://arxiv.org/abs/1508.07909).
    """

    def __init__(self, text: str, size: int = 131) -> None:
        self.pairs: list[str] = []
        for number in range(size - len(CHARACTERS)):
            counts = Counter(map("".join, pairwise(text)))
            pair = max(counts, key=lambda pair: (counts[pair], pair))
            self.pairs.append(pair)
            text = text.replace(pair, chr(FIRST_PAIR + number))
        tokens = [*CHARACTERS, *(chr(FIRST_PAIR + number) for number in range(len(self.pairs)))]
        self.tokens = tokens
        self.number = {token: number for number, token in enumerate(tokens)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> torch.Tensor:
        for number, pair in enumerate(self.pairs):
            text = text.replace(pair, chr(FIRST_PAIR + number))
        return torch.tensor([self.number[token] for token in text])

    def decode(self, ids: torch.Tensor) -> str:
        text = "".join(self.tokens[number] for number in ids.tolist())
        for number, pair in reversed([*enumerate(self.pairs)]):
            text = text.replace(chr(FIRST_PAIR + number), pair)
        return text
