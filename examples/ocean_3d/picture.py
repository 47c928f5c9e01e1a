"""Draw the ocean: a map of the ranks, and sections from pole to pole."""

import sys
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, Colormap, ListedColormap, Normalize
from matplotlib.figure import Figure
from ocean import Ocean

from varcomm import _figures as figures

sys.path.append(str(Path(__file__).parents[2] / "docs" / "_ext"))
from dark import save

WEST = 20  # the map begins at this meridian, in Africa, which leaves each ocean in one piece
ATLANTIC = 330  # degrees east: the section, which crosses three test tiles


def draw(
    path: Path | str,
    ocean: Ocean,
    rank: np.ndarray,
    truth: np.ndarray,
    prediction: np.ndarray,
    rmse: float,
) -> None:
    """Save a map and three sections as one picture, in the format of the suffix of `path`.

    ``rank`` (C,) is the owner of each column. Temperatures (C, L) and their error are in deg C.
    """
    shown = Section(ocean)
    truth, guess = shown.cells(truth), shown.cells(prediction)
    error = guess - truth
    ranks = int(rank.max()) + 1
    celsius = ScalarMappable(Normalize(np.nanmin(truth), np.nanmax(truth)), "plasma")
    limit = np.nanpercentile(np.abs(error), 99)

    with rc_context(figures.style()):
        figure = Figure((figures.WIDTH, 7.6), layout="constrained")
        figure.suptitle(
            "The ocean in three dimensions, learned from its surface", x=0.01, ha="left"
        )
        panels = figure.subplots(2, 2)
        below = {"location": "bottom", "shrink": 0.9, "aspect": 30}
        image = ScalarMappable(BoundaryNorm(np.arange(ranks + 1) - 0.5, ranks), colours(ranks))
        partition(panels[0, 0], ocean, rank, image, shown.longitude)
        bar = figure.colorbar(image, ax=panels[0, 0], ticks=range(ranks), label="rank", **below)
        bar.minorticks_off()

        for ax, values, heading in (
            (panels[0, 1], truth, "Truth"),
            (panels[1, 0], guess, "Prediction"),
        ):
            shown.draw(ax, values, celsius)
            ax.set_title(f"{heading} at {shown.name}")
            figure.colorbar(celsius, ax=ax, label="temperature (°C)", **below)

        image = ScalarMappable(Normalize(-limit, limit), "RdBu_r")
        shown.draw(panels[1, 1], error, image)
        panels[1, 1].set_title(f"Error: RMSE {rmse:.2f} °C in all test tiles")
        label = "prediction - truth (°C)"
        figure.colorbar(image, ax=panels[1, 1], extend="both", label=label, **below)
        save(figure, Path(path))


class Section:
    """A cut through the sea along a meridian: latitudes to the right, levels downwards."""

    def __init__(self, ocean: Ocean) -> None:
        self.ocean = ocean
        here = np.unique(ocean.pos[:, 1])
        self.longitude = float(here[np.argmin(np.abs(here - ATLANTIC))])
        self.name = f"{360 - self.longitude:g}° W"
        self.columns = np.flatnonzero(ocean.pos[:, 1] == self.longitude)
        self.row = ((ocean.pos[self.columns, 0] + 90) // ocean.resolution).astype(int)

    def cells(self, values: np.ndarray) -> np.ndarray:
        """Return the values (C, L) on the section by level and row of the grid; land is NaN."""
        found = np.full((len(self.ocean.depth), 180 // self.ocean.resolution), np.nan)
        found[:, self.row] = values[self.columns].T
        return found

    def draw(self, ax: Axes, cells: np.ndarray, image: ScalarMappable) -> None:
        levels, rows = cells.shape
        edges = np.arange(rows + 1) * self.ocean.resolution - 90
        ax.set_facecolor(figures.LAND)
        ax.pcolormesh(edges, np.arange(levels + 1) - 0.5, cells, cmap=image.cmap, norm=image.norm)
        hidden = np.zeros(rows)
        hidden[self.row] = self.ocean.test[self.columns]
        for first, last in runs(hidden):
            left, right = edges[first].clip(-80, 80), edges[last].clip(-80, 80)
            # dashes that are visible on any colour of the section
            for colour, dash in (("#fdfdfd", "-"), ("black", (0, (4, 2)))):
                lines = {"colors": colour, "linewidths": 1.2, "linestyles": dash}
                ax.vlines([left, right], -0.5, levels - 0.5, **lines)
            if left < right:
                ax.text((left + right) / 2, -0.6, "test", ha="center", va="bottom")
        ticks = range(0, levels, max(levels // 7, 1))
        ax.set_yticks(ticks, [f"{self.ocean.depth[level]:.0f}" for level in ticks])
        ax.set(xlim=(-80, 80), ylim=(levels - 0.5, -2.3), ylabel="depth of the level (m)")
        ax.set_xticks(range(-60, 61, 30), ["60°S", "30°S", "0°", "30°N", "60°N"])
        ax.set_xlabel("latitude")


def runs(mask: np.ndarray) -> list[tuple[int, int]]:
    """Return the first place of each run of true values, and the place after its last."""
    steps = np.diff(np.concatenate([[0], mask, [0]]))
    return list(zip(np.flatnonzero(steps > 0), np.flatnonzero(steps < 0), strict=True))


def partition(
    ax: Axes, ocean: Ocean, rank: np.ndarray, image: ScalarMappable, longitude: float
) -> None:
    """Draw the owner of each column; test tiles are outlined, the section is a line."""
    row = ((ocean.pos[:, 0] + 90) // ocean.resolution).astype(int)
    column = ((ocean.pos[:, 1] - WEST) // ocean.resolution).astype(int)
    extent = WEST, WEST + 360, -90, 90
    cells = np.full((180 // ocean.resolution, 360 // ocean.resolution), np.nan)
    cells[row, column] = rank
    inside = np.zeros(cells.shape)
    inside[row, column] = ocean.test
    ax.set_facecolor(figures.LAND)
    place = {"origin": "lower", "extent": extent, "aspect": "auto"}
    ax.imshow(cells, cmap=image.cmap, norm=image.norm, interpolation="nearest", **place)
    fine = inside.repeat(8, axis=0).repeat(8, axis=1)
    ax.contour(fine, [0.5], extent=extent, origin="lower", colors="black", linewidths=0.6)
    ax.axvline(longitude, color="black", linewidth=2, linestyle="--")
    ax.set_xticks(range(60, 361, 120), ["60°E", "180°", "60°W"])
    ax.set_yticks(range(-60, 61, 30), ["60°S", "30°S", "0°", "30°N", "60°N"])
    ax.set(xlabel="longitude", ylabel="latitude", ylim=(-80, 90))
    ax.set_title("Ranks; test tiles outlined")


def colours(count: int) -> Colormap:
    """Return one colour per rank."""
    return ListedColormap(figures.rank_colours(count))
