"""Draw a forecast: how the grid is split, the truth, the forecast, the error."""

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from climate import SHAPE, SOUTH, STEP, WEST, read, rmse
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from sea_months import MONTHS, TEST

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save


def draw(path: Path, sizes: Sequence[Sequence[int] | None], change: np.ndarray, start: int) -> None:
    """Save four maps of the forecast that starts at a month, of `change` (12, rows, columns)."""
    block = read(range(SHAPE[0]), range(SHAPE[1]))
    sst, land = block.fields[:, 0].numpy(), ~block.sea.numpy()
    truth = sst[(start + 1) % 12] - sst[start]
    month, following = MONTHS[start], MONTHS[(start + 1) % 12]
    limit = np.percentile(np.abs(truth[~land]), 99)
    image = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
    error = rmse(change)[TEST.index(start)]
    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 4.1), layout="constrained")
        panels = figure.subplots(2, 2)
        owners = owner_of_each(sizes)
        ranks = int(owners.max()) + 1
        colours = figures.rank_colours(ranks)
        shade = ScalarMappable(Normalize(-0.5, ranks - 0.5), ListedColormap(colours))
        world_map(panels[0, 0], np.where(land, np.nan, owners), shade)
        panels[0, 0].set_title(f"{SHAPE[0]} x {SHAPE[1]} points by rank")
        legend = [Patch(color=colour, label=str(rank)) for rank, colour in enumerate(colours)]
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16)}
        panels[0, 0].legend(handles=legend, ncols=8, handlelength=1, columnspacing=1, **below)
        maps = {
            f"Truth: change from {month} to {following}": truth,
            f"Forecast ({following} is held out)": change[start],
            f"Error: RMSE {error:.2f} °C": change[start] - truth,
        }
        for ax, (title, values) in zip(panels.flat[1:], maps.items(), strict=True):
            world_map(ax, np.where(land, np.nan, values), image)
            ax.set_title(title)
        below = {"location": "bottom", "shrink": 0.7, "aspect": 40, "extend": "both"}
        label = "change of the sea surface temperature in a month (°C)"
        figure.colorbar(image, ax=panels, label=label, **below)
        save(figure, path)


def owner_of_each(sizes: Sequence[Sequence[int] | None]) -> np.ndarray:
    """Return the rank of each point; ranks are counted along rows of the mesh."""
    along = [
        np.zeros(count, int) if rows is None else np.arange(len(rows)).repeat(rows)
        for count, rows in zip(SHAPE, sizes, strict=True)
    ]
    columns = 1 if sizes[1] is None else len(sizes[1])
    return along[0][:, None] * columns + along[1]


def world_map(ax: Axes, values: np.ndarray, image: ScalarMappable) -> None:
    ax.set_facecolor(figures.LAND)
    west, south = WEST - STEP / 2, SOUTH - STEP / 2
    extent = (west, west + 360, south, south + STEP * SHAPE[0])
    place = {"origin": "lower", "extent": extent, "interpolation": "nearest", "aspect": "auto"}
    ax.imshow(values, cmap=image.cmap, norm=image.norm, **place)
    ax.set_xticks([60, 180, 300], ["60°E", "180°", "60°W"])
    ax.set_yticks([-40, 0, 40], ["40°S", "0°", "40°N"])
