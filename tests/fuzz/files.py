"""Saved partitions and checkpoints of which a file was altered: refused, or read as it was."""

import hashlib
import json
import resource
from pathlib import Path

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file

import varcomm
from tests.fuzz.programs import for_each
from tests.graph.graphs import wild
from varcomm.checkpoint import read, save
from varcomm.graph import PartitionedGraph, partition

ROOM = 1 << 29  # bytes of address space beyond what is there, for whatever a file says

# Numbers that a length, a place or a shape may be altered to.
ODD = (-1, 0, 1, 255, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) + 1, (1 << 63) - 1, (1 << 64) - 1)
ODD_VALUES = (None, True, -1, 0, 1 << 62, 0.5, "", "../../etc/passwd", [], {}, [[]], "load")


def in_a_graph(folder):
    partition(wild(), method="block").save(folder)


def in_a_checkpoint(folder):
    model = {"w": torch.rand(4, 3), "b": torch.rand(3)}
    save({"model": model, "step": 7, "rest": [1, "a"]}, folder)


def in_other_files(folder):
    folder.mkdir()
    save_file({"w": torch.rand(4, 3), "b": torch.rand(3)}, folder / "model.safetensors")


SAVED = {
    "graph": (in_a_graph, PartitionedGraph.load),
    "checkpoint": (in_a_checkpoint, read),
    "other": (in_other_files, read),
}


def altered_bytes(content, draws):
    """Return some bytes with one to three changes."""
    data = bytearray(content)
    for _ in range(draws.randint(1, 3)):
        at, length = draws.randrange(len(data) + 1), draws.choice((1, 2, 4, 8, 100))
        kind, width = draws.randrange(6), draws.choice((4, 8))
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = draws.randbytes(length)
        elif kind == 3:
            data[at:at] = data[draws.randrange(len(data) + 1) :][:length]
        elif kind == 4:
            number = draws.choice(ODD) % (1 << (8 * width))
            data[at : at + width] = number.to_bytes(width, draws.choice(("little", "big")))
        elif at < len(data):
            data[at] ^= 1 << draws.randrange(8)
    return bytes(data)


def places(value, path=()):
    """Return where in JSON there is something."""
    if not isinstance(value, dict | list):
        return [path]
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def altered_json(content, draws):
    """Return JSON in which something else stands somewhere, with the digest that this has."""
    value = json.loads(content)
    value.pop("digest", None)
    *path, last = draws.choice([path for path in places(value) if path])
    holder = value
    for key in path:
        holder = holder[key]
    if draws.random() < 0.2:
        del holder[last]
    else:
        holder[last] = draws.choice(ODD_VALUES)
    text = json.dumps(value, sort_keys=True).encode()
    return json.dumps(value | {"digest": hashlib.sha256(text).hexdigest()}).encode()


def plain(value):
    """What was read, as something that can be compared."""
    if isinstance(value, PartitionedGraph):
        shard = value.node_shards[None]
        return [plain(shard.attributes), plain(value.attributes), value.method, value.hops]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.tolist()
    return value


def attempts(rank, folder, kind, count, number):
    """Alter files, one at a time, and read; how often it was refused, and what went wrong."""
    folder, (write, reader) = Path(folder) / kind, SAVED[kind]
    write(folder)
    files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    wanted, refused, wrong = plain(reader(folder)), 0, []

    def example(draws):
        nonlocal refused
        path = draws.choice(list(files))
        is_signed = path.suffix == ".json" and draws.random() < 0.7
        path.write_bytes((altered_json if is_signed else altered_bytes)(files[path], draws))
        try:
            # a signed file may hold other values; files of other tools have no digests
            if plain(reader(folder)) != wanted and not is_signed and kind != "other":
                wrong.append(f"{path.name} was read as something else")
        except varcomm.VarcommError as error:
            refused += 1
            if "allocat" in str(error) or "MemoryError" in str(error):
                wrong.append(f"{path.name}: room was asked for: {error}")
        except Exception as error:
            wrong.append(f"{path.name}: {type(error).__name__}: {error}")
        path.write_bytes(files[path])

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, hard))
    try:
        for_each(st.randoms(use_true_random=False), count, number, example)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    return refused, wrong
