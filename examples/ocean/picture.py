"""Draw the ocean: partition, truth, prediction, error."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

SHALLOW = "#b9b6b0"  # sea without a temperature at this depth
WEST = 20  # the maps begin at this meridian, in Africa, which leaves each ocean in one piece


def draw(
    path: Path | str,
    pos: np.ndarray,
    rank: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    test_mask: np.ndarray,
    *,
    spacing: int,
    title: str,
) -> None:
    """Save four maps as one picture, in the format of the suffix of `path`.

    ``pos`` (N, 2) is the latitude and longitude of each node in degrees, and ``rank`` (N,) its
    owner. ``truth`` (N,) and ``prediction`` (N,) are in deg C; ``truth`` is NaN if a node has no
    temperature. ``test_mask`` (N,) is true for nodes outside the training data. ``spacing`` is in
    degrees.
    """
    row = np.floor((pos[:, 0] + 90) / spacing).astype(int)
    column = np.floor((pos[:, 1] - WEST) % 360 / spacing).astype(int)

    def grid(values: np.ndarray) -> np.ndarray:
        cells = np.full((180 // spacing, 360 // spacing), np.nan)
        cells[row, column] = values
        return cells

    error = prediction - truth
    rmse = np.sqrt(np.mean(error[test_mask] ** 2))
    sea = grid(np.zeros(len(pos)))
    masked = np.where(np.isfinite(truth), prediction, np.nan)
    ranks = int(rank.max()) + 1
    celsius = Normalize(np.nanmin(truth), np.nanpercentile(truth, 99.5))
    limit = np.nanpercentile(np.abs(error), 99)

    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 5.6), layout="constrained")
        figure.suptitle(title, x=0.01, ha="left")
        panels = figure.subplots(2, 2)

        def panel(
            ax: Axes,
            values: np.ndarray,
            heading: str,
            image: ScalarMappable,
            label: str,
            **options: object,
        ) -> None:
            world_map(ax, sea, grid(values), image)
            ax.set_title(heading)
            below = {"location": "bottom", "shrink": 0.9, "aspect": 30, "pad": 0.03}
            bar = figure.colorbar(image, ax=ax, label=label, **below, **options)
            bar.outline.set_visible(False)
            bar.minorticks_off()

        image = ScalarMappable(BoundaryNorm(np.arange(ranks + 1) - 0.5, ranks), colours(ranks))
        panel(panels[0, 0], rank, "Partition", image, "rank", ticks=range(ranks))
        image = ScalarMappable(celsius, "plasma")
        label = "temperature at 400 m (°C)"
        panel(panels[0, 1], truth, "Truth (grey sea: shallower)", image, label, extend="max")
        panel(panels[1, 0], masked, "Prediction", image, label, extend="max")
        image = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
        heading = f"Error: RMSE {rmse:.2f} °C in outlined tiles"
        label = "prediction - truth (°C)"
        panel(panels[1, 1], error, heading, image, label, extend="both")
        outline(panels[1, 1], grid(test_mask) == 1)
        save(figure, Path(path))


def extent() -> tuple[float, float, float, float]:
    return WEST, WEST + 360, -90, 90


def world_map(ax: Axes, sea: np.ndarray, cells: np.ndarray, image: ScalarMappable) -> None:
    ax.set_facecolor(figures.LAND)
    place = {"origin": "lower", "extent": extent(), "interpolation": "nearest"}
    ax.imshow(sea, cmap=ListedColormap([SHALLOW]), **place)
    ax.imshow(cells, cmap=image.cmap, norm=image.norm, **place)
    ax.set_ylim(-80, 90)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


def outline(ax: Axes, inside: np.ndarray) -> None:
    """Draw the border between cells inside and outside, along the cells' edges."""
    fine = inside.repeat(8, axis=0).repeat(8, axis=1)
    ax.contour(fine, [0.5], extent=extent(), origin="lower", colors="black", linewidths=0.5)


def colours(count: int) -> Colormap:
    """Return one colour per rank."""
    return ListedColormap(figures.rank_colours(count))
