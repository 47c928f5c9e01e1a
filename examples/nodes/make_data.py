"""Pack graphs in METIS's text format into ``data/NAME.xz``, a tenth to a third of their size.

    python examples/nodes/make_data.py FILE ...

``FILE`` is ``NAME.graph``, or ``NAME.graph.xz`` if it is compressed.
"""

import argparse
import lzma
from pathlib import Path

import numpy as np
from graphs import FOLDER, neighbours


def read(path: Path) -> tuple[int, np.ndarray]:
    """Return the number of nodes and the edges (2, E), each in both directions."""
    content = path.read_bytes()
    content = lzma.decompress(content) if path.suffix == ".xz" else content
    head, *lines = content.decode().splitlines()
    nodes, edges = map(int, head.split())  # with a third number, nodes or edges have weights
    rows = [np.array(line.split(), dtype=np.int64) - 1 for line in lines[:nodes]]
    edge_index = np.stack([np.concatenate(rows), np.repeat(np.arange(nodes), [*map(len, rows)])])
    if edge_index.shape[1] != 2 * edges:
        raise SystemExit(f"{path}: need {2 * edges:,} neighbours, got {edge_index.shape[1]:,}")
    return nodes, edge_index


def packed(nodes: int, edge_index: np.ndarray) -> bytes:
    """Return the number of later neighbours of each node, and the gaps between them.

    Small numbers with similar high bytes compress well.
    """
    later = np.unique(edge_index[::-1][:, edge_index[0] > edge_index[1]], axis=1)
    node, neighbour = later
    first = np.diff(node, prepend=-1) > 0
    gap = neighbour - np.where(first, node, np.roll(neighbour, 1))
    count = np.bincount(node, minlength=nodes)
    head = np.array([nodes, len(gap)], dtype="<u4")
    planes = gap.astype("<u4").view(np.uint8).reshape(-1, 4).T
    if count.max() > 255:
        raise SystemExit(f"a node has {count.max()} later neighbours, and a byte counts to 255")
    raw = head.tobytes() + count.astype(np.uint8).tobytes() + planes.tobytes()
    return lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="of METIS's format")
    for path in parser.parse_args().files:
        nodes, edge_index = read(path)
        output = FOLDER / f"{path.name.split('.')[0]}.xz"
        output.write_bytes(packed(nodes, edge_index))
        whole = edge_index[:, np.lexsort(edge_index)]  # by target, then by source
        if not np.array_equal(neighbours(output), whole):
            raise SystemExit(f"{output} differs from {path} after reading")
        size = output.stat().st_size
        print(f"{output}: {nodes:,} nodes, {edge_index.shape[1] // 2:,} edges, {size:,} bytes")


if __name__ == "__main__":
    main()
