"""The world ocean in three dimensions as a graph, of which each rank makes its own part.

A node is a sea cell of a regular grid at one of 20 depths. Edges join it to its 4 neighbours at the
same depth, and to the cells above and below. Nodes are numbered column by column, each from the
surface down, and every cell below the surface of a test tile is for the test.
"""

from pathlib import Path

import numpy as np
import torch
from torch_geometric.data import Data

FILE = Path(__file__).parent / "data" / "ocean_3d.npz"
TILE = 10  # degrees
RESOLUTIONS = [n for n in range(1, 13) if 180 % n == 0]
DEPTHS = 20
CHANNELS = 7, 4, 1  # of a node, of an edge, of a prediction


def counted(counts: np.ndarray) -> np.ndarray:
    """From 0 on for each count: 0, 1, 2, 0, 1 for 3, 2."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(starts, counts)


def on_log_scale(depth: np.ndarray) -> np.ndarray:
    """Levels lie closer near the surface; on this scale their distances are much the same."""
    return np.log1p(depth / 100)


class Ocean:
    """What is known of all columns of sea, and the parts of the graph that are made of it.

    ``resolution`` is in degrees: k takes every k-th row and column of the grid. ``levels`` are
    taken evenly of the 20, the first and the last among them. Arrays of C columns, L levels:

    - ``pos`` (C, 2): latitude north and longitude east, in degrees, from south to north.
    - ``depth`` (L,), in m, and ``levels`` (C,): how many of them a column has, from the top.
    - ``first`` (C,): the number of each column's first node.
    - ``temperature`` (C, L), in deg C, NaN below the sea floor.
    - ``test`` (C,): whether a column is in a test tile.
    - ``fit`` (C, L): a linear fit at each level to what the surface shows in the other columns,
      in deg C, and ``std`` (L,): how far these are from it. The network learns what the fit leaves.
    - ``edges`` (2, e): which columns are neighbours, source above target.
    """

    def __init__(self, resolution: int, levels: int = DEPTHS) -> None:
        if resolution not in RESOLUTIONS or not 2 <= levels <= DEPTHS:
            raise ValueError(
                f"need a resolution of {RESOLUTIONS} and 2 to {DEPTHS} levels, "
                f"got {resolution} and {levels}"
            )
        with np.load(FILE) as file:
            field = {name: file[name] for name in file.files}
        self.resolution = resolution
        row, column, deep = (field[name].astype(np.int64) for name in ("row", "column", "levels"))
        known = np.full((DEPTHS, len(row)), np.nan)
        known[np.arange(DEPTHS)[:, None] < deep] = field["millidegrees"] / 1000

        cells = (row % resolution == 0) & (column % resolution == 0)
        chosen = np.linspace(0, DEPTHS - 1, levels).round().astype(np.int64)
        self.depth = field["depth"][chosen].astype(np.float64)
        self.temperature = known[chosen][:, cells].T
        self.levels = np.isfinite(self.temperature).sum(axis=1)
        self.first = np.cumsum(self.levels) - self.levels
        self.pos = np.stack([row - 89.5, column + 20.5], axis=1)[cells]
        shape = 180 // resolution, 360 // resolution
        self.edges = neighbours(row[cells] // resolution, column[cells] // resolution, shape)

        tile_row, tile_column = (self.pos // TILE).astype(np.int64).T
        # A knight's move from one test tile to the next: no two touch, but where the grid ends.
        self.test = (tile_row + 2 * tile_column) % 5 == 0

        phi, theta = np.deg2rad(self.pos).T
        place = [np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)]
        salinity, floor = field["surface_salinity"][cells], field["floor_depth"][cells]
        shown = [self.temperature[:, 0], salinity, on_log_scale(floor)]
        shown = [(values - values.mean()) / values.std() for values in shown]
        self.surface = np.stack([*place, *shown], axis=1)  # (C, 6), known everywhere
        self.fit = self._linear_fit()
        self.std = np.nanstd((self.temperature - self.fit)[~self.test], axis=0)
        self.std[0] = 1  # the fit leaves nothing of the surface, which is known

    @property
    def num_nodes(self) -> int:
        return int(self.levels.sum())

    def nodes(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The nodes of some columns: their numbers, and column and level of each."""
        column = np.repeat(columns, self.levels[columns])
        level = counted(self.levels[columns])
        return self.first[column] + level, column, level

    def part(
        self, columns: np.ndarray, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """The nodes of some columns, and all edges into them; of no other is anything made.

        The numbers of the nodes, (n,); their attributes; edges in the numbers of the whole graph,
        (2, e); and attributes of the edges, (e, 4): displacement to the east and to the north and
        distance, in resolutions, and down, on the scale of the depth. Attributes of nodes are

        - ``x`` (n, 7): place on the unit sphere, what the surface above shows (temperature,
          salinity), depth of the sea floor, and of the node.
        - ``y`` (n, 1): temperature beyond the linear fit, in standard deviations of the level.
        - ``train`` (n,): below the surface of no test tile.
        """
        number, column, level = self.nodes(columns)
        y = (self.temperature - self.fit)[column, level] / self.std[level]
        x = np.column_stack([self.surface[column], on_log_scale(self.depth[level])])
        attributes = {
            "x": torch.from_numpy(x).to(dtype),
            "y": torch.from_numpy(y[:, None]).to(dtype),
            "train": torch.from_numpy((level > 0) & ~self.test[column]),
        }
        along, moved_along = self._along_levels(columns)
        scale = on_log_scale(self.depth)
        up, down = level > 0, level + 1 < self.levels[column]
        across = np.concatenate(
            [[number[up] - 1, number[up]], [number[down] + 1, number[down]]], axis=1
        )
        moved_across = np.zeros((across.shape[1], 4))
        moved_across[:, 3] = np.concatenate(
            [scale[level[up]] - scale[level[up] - 1], scale[level[down]] - scale[level[down] + 1]]
        )
        edge_index = torch.from_numpy(np.concatenate([along, across], axis=1))
        moved = torch.from_numpy(np.concatenate([moved_along, moved_across])).to(dtype)
        return torch.from_numpy(number), attributes, edge_index, moved

    def _along_levels(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Edges between neighbours into some columns, and how far they go."""
        source, target = self.edges[:, np.isin(self.edges[1], columns)]
        north, east = (self.pos[target] - self.pos[source]).T
        east = (east + 180) % 360 - 180
        east = east * np.cos(np.deg2rad(self.pos[target, 0]))
        moved = np.stack([east, north, np.hypot(east, north), 0 * east], axis=1) / self.resolution
        both = np.minimum(self.levels[source], self.levels[target])
        level = counted(both)
        edges = np.stack([self.first[end].repeat(both) + level for end in (source, target)])
        return edges, moved.repeat(both, axis=0)

    def whole(self, dtype: torch.dtype = torch.float32) -> Data:
        """The whole graph, for one process."""
        _, attributes, edge_index, edge_attr = self.part(np.arange(len(self.pos)), dtype)
        return Data(**attributes, edge_index=edge_index, edge_attr=edge_attr)

    def celsius(self, prediction: np.ndarray) -> np.ndarray:
        """Temperatures (C, L) in deg C, of a prediction of `y` at all nodes, (N,).

        At the surface those that are known.
        """
        table = np.full(self.temperature.shape, np.nan)
        table[np.isfinite(self.temperature)] = prediction
        table = self.fit + table * self.std
        table[:, 0] = self.temperature[:, 0]
        return table

    def _linear_fit(self) -> np.ndarray:
        known = np.column_stack([self.surface, np.ones(len(self.pos))])
        fit = np.empty(self.temperature.shape)
        for level, truth in enumerate(self.temperature.T):
            used = np.isfinite(truth) & ~self.test
            fit[:, level] = known @ np.linalg.lstsq(known[used], truth[used])[0]
        return fit

    def level_mean(self) -> np.ndarray:
        """Temperatures (C, L) of which each is the mean of its level, over training columns."""
        mean = np.nanmean(self.temperature[~self.test], axis=0)
        return np.broadcast_to(mean, self.temperature.shape)

    def rmse(self, prediction: np.ndarray) -> tuple[np.ndarray, float]:
        """Errors of temperatures (C, L) in the test tiles, in deg C: at each level, and below 0."""
        square = (prediction - self.temperature)[self.test] ** 2
        return np.sqrt(np.nanmean(square, axis=0)), float(np.sqrt(np.nanmean(square[:, 1:])))


def neighbours(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Directed edges (2, e), source above target, between cells side by side; columns wrap."""
    cell = np.full((shape[0] + 2, shape[1]), -1)  # a row of land beyond each pole
    cell[row + 1, column] = np.arange(len(row))
    around = [(-1, 0), (0, -1), (0, 1), (1, 0)]
    source = np.stack(
        [cell[row + 1 + north, (column + east) % shape[1]] for north, east in around], axis=1
    )
    target = np.broadcast_to(np.arange(len(row))[:, None], source.shape)
    return np.stack([source, target])[:, source >= 0]
