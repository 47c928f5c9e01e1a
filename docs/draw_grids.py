"""Draw images/grid_layers.svg: the rows that layers of a split field fetch.

python docs/draw_grids.py

Fields with one marked row each pass through real layers on three ranks. An output that is not zero
reads the marked row.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import varcomm as vc
from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parent / "_ext"))
from dark import ON_DARK, twin

FILE = Path(__file__).parent / "images" / "grid_layers.svg"
SIZES = [3, 1, 2]
LAYERS = {
    "convolution 3 x 3": nn.Conv2d(1, 1, 3, padding=1, bias=False),
    "the same, stride 2": nn.Conv2d(1, 1, 3, stride=2, padding=1, bias=False),
    "transposed, stride 2": nn.ConvTranspose2d(
        *(1, 1, 3), stride=2, padding=1, output_padding=1, bias=False
    ),
    "pool 2 x 2": nn.MaxPool2d(2),
}
# pixels: of a panel, of a bar, from its left to the outputs, between rows, between ranks, of titles
PANEL, BAR, ACROSS, PITCH, HEIGHT, GAP, TOP, LEFT = 172, 34, 112, 22, 18, 18, 40, 62


def reads(rank, name):
    """Return the input rows that each output row of this rank reads, and the rows it received."""
    layer, rows = LAYERS[name], sum(SIZES)
    for weight in layer.parameters():
        nn.init.ones_(weight)
    grid = vc.grid.Grid((rows, 2), sizes=[SIZES, None])
    x = grid.scatter(torch.eye(rows)[:, None, :, None].repeat(1, 1, 1, 2))
    with torch.no_grad(), vc.trace() as calls:
        out = layer(x).local
    found = [out[:, 0, row].any(1).nonzero()[:, 0].tolist() for row in range(out.shape[2])]
    return found, sum(call.received for call in calls) // (x.element_size() * rows * 2)


def bars(x, top, count, rank, first, kind):
    """Yield rows of one rank, with their numbers."""
    for place in range(count):
        y = top + place * PITCH
        yield (
            f'<rect x="{x}" y="{y}" width="{BAR}" height="{HEIGHT}" rx="3" '
            f'fill="{figures.RANKS[rank]}"/><text x="{x + BAR / 2:g}" y="{y + 13.5:g}" '
            f'class="on">{first + place}</text>'
        )
    if not count:
        yield f'<text x="{x + BAR / 2:g}" y="{top + 13:g}" class="pale">{kind}</text>'


def panel(left, name, found, tops):
    """Yield a layer: the input rows, the output rows, and a line for each row that one reads."""
    owners = [rank for rank, count in enumerate(SIZES) for _ in range(count)]
    starts = [tops[owner] + (row - owners.index(owner)) * PITCH for row, owner in enumerate(owners)]
    right, fetched = left + ACROSS, sum(received for _, received in found)
    middle = left + (ACROSS + BAR) / 2
    yield f'<text x="{middle:g}" y="14">{name}</text>'
    words = "1 row travels" if fetched == 1 else f"{fetched} rows travel"
    yield f'<text x="{middle:g}" y="30" class="pale">{words}</text>'
    lines = []
    for rank, (rows, _) in enumerate(found):
        for place, sources in enumerate(rows):
            end = tops[rank] + place * PITCH + HEIGHT / 2
            for row in sources:
                path = f"M{left + BAR + 1} {starts[row] + HEIGHT / 2:g}L{right - 2} {end:g}"
                owner = owners[row]
                look = 'class="here"' if owner == rank else f'stroke="{figures.LINES[owner]}"'
                lines.append((owner != rank, f'<path d="{path}" {look}/>'))
    yield from (line for _, line in sorted(lines))  # rows that travel above the others
    first = 0
    for rank, (rows, _) in enumerate(found):
        yield from bars(left, tops[rank], SIZES[rank], rank, owners.index(rank), "")
        yield from bars(right, tops[rank], len(rows), rank, first, "none")
        first += len(rows)


def picture(found):
    """Return the SVG of all layers, whose `found` has what :func:`reads` returns on each rank."""
    tops, y = [], TOP
    for rank, count in enumerate(SIZES):
        tops.append(y)
        y += PITCH * max(count, *(len(of[rank][0]) for of in found.values())) + GAP
    ink, pale = figures.INK, figures.PALE
    style = (
        f"text{{font:13px sans-serif;text-anchor:middle;fill:{ink}}}.on{{fill:black}}"
        f".pale{{fill:{pale}}}path{{fill:none;stroke-width:2}}"
        f".here{{stroke:{figures.LAND};stroke-width:1}}"
    )
    width, height = LEFT + len(found) * PANEL - (PANEL - ACROSS - BAR) + 4, y - GAP
    parts = [
        f'<text x="{LEFT / 2 - 4:g}" y="{top + 13:g}" class="pale">rank {rank}</text>'
        for rank, top in enumerate(tops)
    ]
    for place, (name, of_ranks) in enumerate(found.items()):
        parts += panel(LEFT + place * PANEL, name, of_ranks, tops)
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">',
        f"<style>{style}</style>",
        *parts,
        "</svg>\n",
    ])  # fmt: skip


def pictures(run):
    """Return the content of each file; ``run(fn, argument)`` runs a function on three ranks."""
    light = dark = picture({name: run(reads, name) for name in LAYERS})
    for colour, other in ON_DARK.items():
        dark = dark.replace(colour, other)
    return {FILE: light, twin(FILE): dark}


if __name__ == "__main__":
    with vc.Ranks(3) as ranks:
        for path, svg in pictures(ranks.run).items():
            path.write_text(svg)
