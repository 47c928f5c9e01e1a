"""The world ocean in three dimensions as a graph; each rank makes its own part.

A node is a sea cell of a regular grid at one of 20 depths. Edges join it to its 4 neighbours at the
same depth, and to the cells above and below. Nodes are numbered column by column, from the surface
down. All cells below the surface of a test tile are for the test.
"""

import warnings
from pathlib import Path

import numpy as np
import torch
from scipy.io import netcdf_file

import varcomm as vc
from varcomm.graph import PartitionedGraph

FILE = Path(__file__).parent / "data" / "ocean_3d.nc"
MISSING = -(2**15)  # in place of a temperature below the sea floor
TILE = 10  # degrees
RESOLUTIONS = [n for n in range(1, 13) if 180 % n == 0]
DEPTHS = 20
CHANNELS = 7, 4, 1  # widths of nodes, edges and predictions


def field(name: str) -> np.ndarray:
    """Return a field as a map of the file: a rank reads only its columns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the array keeps the map open
        with netcdf_file(FILE) as file:
            return file.variables[name].data


def counted(counts: np.ndarray) -> np.ndarray:
    """Return ranges from 0 for all counts: 0, 1, 2, 0, 1 for counts 3, 2."""
    starts = np.cumsum(counts) - counts
    return np.arange(counts.sum()) - np.repeat(starts, counts)


def on_log_scale(depth: np.ndarray) -> np.ndarray:
    """Return depths on a logarithmic scale, on which levels are about evenly spaced."""
    return np.log1p(depth / 100)


def mean(table: np.ndarray) -> np.ndarray:
    """Return the mean of each column over the rows of all ranks, without NaN; collective."""
    sums = np.stack([np.nansum(table, axis=0), np.isfinite(table).sum(axis=0)])
    total, count = vc.all_reduce(torch.from_numpy(sums)).numpy()
    return total / count


def moments(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and standard deviation, as :func:`mean`."""
    middle = mean(table)
    return middle, np.sqrt(mean((table - middle) ** 2))


class Ocean:
    """The columns of sea, which every rank reads, and edges between nodes.

    ``resolution`` is in degrees: with k, every k-th row and column of the grid. ``levels`` are
    evenly chosen from the 20, including the first and the last. Arrays of C columns and L levels:

    - ``pos`` (C, 2): latitude north and longitude east, in degrees, from south to north.
    - ``row`` (C,): the row of each column in the file; ``chosen`` (L,): the levels in the file.
    - ``depth`` (L,), in m; ``levels`` (C,): the number of levels of each column.
    - ``first`` (C,): the id of each column's first node.
    - ``test`` (C,): whether a column is in a test tile.
    - ``edges`` (2, e): neighbouring columns, sources first.
    """

    def __init__(self, resolution: int, levels: int = DEPTHS) -> None:
        if resolution not in RESOLUTIONS or not 2 <= levels <= DEPTHS:
            raise ValueError(
                f"need a resolution of {RESOLUTIONS} and 2 to {DEPTHS} levels, "
                f"got {resolution} and {levels}"
            )
        with netcdf_file(FILE) as file:  # a memory map: the fields are not read
            names = "row", "column", "levels", "depth"
            row, column, deep, depth = (np.array(file.variables[name].data) for name in names)
        self.resolution = resolution
        self.row = np.flatnonzero((row % resolution == 0) & (column % resolution == 0))
        row, column, deep = (values[self.row].astype(np.int64) for values in (row, column, deep))
        self.chosen = np.linspace(0, DEPTHS - 1, levels).round().astype(np.int64)
        self.depth = depth[self.chosen].astype(np.float64)
        self.levels = np.searchsorted(self.chosen, deep)
        self.first = np.cumsum(self.levels) - self.levels
        self.pos = np.stack([row - 89.5, column + 20.5], axis=1)
        shape = 180 // resolution, 360 // resolution
        self.edges = neighbours(row // resolution, column // resolution, shape)

        tile_row, tile_column = (self.pos // TILE).astype(np.int64).T
        # Test tiles are a knight's move apart: two of them touch only at the seam of longitudes.
        self.test = (tile_row + 2 * tile_column) % 5 == 0

    @property
    def num_nodes(self) -> int:
        return int(self.levels.sum())

    def along_levels(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the edges into some columns at each level, and their displacements."""
        source, target = self.edges[:, np.isin(self.edges[1], columns)]
        north, east = (self.pos[target] - self.pos[source]).T
        east = (east + 180) % 360 - 180
        east = east * np.cos(np.deg2rad(self.pos[target, 0]))
        moved = np.stack([east, north, np.hypot(east, north), 0 * east], axis=1) / self.resolution
        both = np.minimum(self.levels[source], self.levels[target])
        level = counted(both)
        edges = np.stack([self.first[end].repeat(both) + level for end in (source, target)])
        return edges, moved.repeat(both, axis=0)


class Fields:
    """The fields of the rank's columns, which it reads from the file; collective.

    Arrays of the rank's c columns and L levels:

    - ``ids`` (c,): the columns, ascending.
    - ``temperature`` (c, L), in deg C, NaN below the sea floor.
    - ``surface`` (c, 6): position on the unit sphere; standardised temperature, salinity and depth
      of the sea floor.
    - ``fit`` (c, L): a linear fit per level to the surface data of all training columns, in deg C;
      ``std`` (L,): the deviation from the fit. The network learns the residual.
    """

    def __init__(self, ocean: Ocean, columns: PartitionedGraph) -> None:
        self.ocean, self.columns = ocean, columns
        self.ids = columns.owned_ids.numpy()
        rows = torch.from_numpy(ocean.row)[columns.owned_ids]
        names = "millidegrees", "surface_salinity", "floor_depth"
        fields = [vc.graph.Rows(field(name), columns, rows=rows) for name in names]
        levels = torch.stack([*fields[0].samples(ocean.chosen)], dim=1).double().numpy()
        self.temperature = np.where(levels == MISSING, np.nan, levels / 1000)
        salinity, floor = (values[0].double().numpy() for values in fields[1:])
        self.bytes_read = sum(values.bytes_read for values in fields)

        phi, theta = np.deg2rad(ocean.pos[self.ids]).T
        place = [np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)]
        known = np.column_stack([self.temperature[:, 0], salinity, on_log_scale(floor)])
        middle, spread = moments(known)
        self.surface = np.column_stack([*place, (known - middle) / spread])
        self._train = ~ocean.test[self.ids]
        self.fit = self._linear_fit()
        self.std = moments((self.temperature - self.fit)[self._train])[1]
        self.std[0] = 1  # the surface is known, so its residual is zero

    def part(
        self, dtype: torch.dtype = torch.float32
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
        """Return the nodes of the rank's columns, and all edges into these nodes.

        The results are ids of the nodes, (n,); node attributes; edges (2, e) in global ids; and
        edge attributes (e, 4). An edge has its displacement to the east and to the north and its
        length, in units of the resolution, and its displacement down, on the logarithmic scale.
        Node attributes are

        - ``x`` (n, 7): position on the unit sphere, temperature and salinity of the surface above,
          depth of the sea floor, depth of the node.
        - ``y`` (n, 1): residual of the linear fit, in standard deviations of the level.
        - ``train`` (n,): whether the node is in the training set.
        """
        levels = self.ocean.levels[self.ids]
        column, level = np.repeat(np.arange(len(levels)), levels), counted(levels)
        number = self.ocean.first[self.ids][column] + level
        y = (self.temperature - self.fit)[column, level] / self.std[level]
        scale = on_log_scale(self.ocean.depth)
        x = np.column_stack([self.surface[column], scale[level]])
        attributes = {
            "x": torch.from_numpy(x).to(dtype),
            "y": torch.from_numpy(y[:, None]).to(dtype),
            "train": torch.from_numpy((level > 0) & self._train[column]),
        }
        along, moved_along = self.ocean.along_levels(self.ids)
        up, down = level > 0, level + 1 < levels[column]
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

    def celsius(self, prediction: np.ndarray) -> np.ndarray:
        """Return temperatures (c, L) in deg C for a prediction of `y` at the rank's nodes, (n,).

        The surface has its known temperatures.
        """
        table = np.full(self.temperature.shape, np.nan)
        table[np.isfinite(self.temperature)] = prediction
        table = self.fit + table * self.std
        table[:, 0] = self.temperature[:, 0]
        return table

    def _linear_fit(self) -> np.ndarray:
        known = np.column_stack([self.surface, np.ones(len(self.ids))])
        factors = []
        for truth in self.temperature.T:
            used = np.isfinite(truth) & self._train
            table = np.column_stack([known, truth])[used]
            factors.append(torch.from_numpy(np.linalg.qr(table, mode="r")))
        # the factors R of all ranks have the same least squares as all rows
        tables = [table.numpy() for table in vc.all_gather_v(tuple(factors))]
        weights = [np.linalg.lstsq(table[:, :-1], table[:, -1])[0] for table in tables]
        return known @ np.column_stack(weights)

    def level_mean(self) -> np.ndarray:
        """Return temperatures (c, L): the mean of each level over training columns."""
        level = mean(self.temperature[self._train])
        return np.broadcast_to(level, self.temperature.shape)

    def rmse(self, prediction: np.ndarray) -> tuple[np.ndarray, float]:
        """Return errors of temperatures (c, L) in the test tiles, in deg C: per level, total."""
        square = (prediction - self.temperature)[~self._train] ** 2
        return np.sqrt(mean(square)), float(np.sqrt(mean(square[:, 1:].reshape(-1, 1)))[0])

    def gathered(self, table: np.ndarray) -> np.ndarray:
        """Return the table (C, L) of all columns, on the first rank, from parts (c, L)."""
        return self.columns.gather(torch.from_numpy(table), dst=0).numpy()


def neighbours(row: np.ndarray, column: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return directed edges (2, e) between cells side by side; longitudes are periodic."""
    cell = np.full((shape[0] + 2, shape[1]), -1)  # a row of land beyond each pole
    cell[row + 1, column] = np.arange(len(row))
    around = [(-1, 0), (0, -1), (0, 1), (1, 0)]
    source = np.stack(
        [cell[row + 1 + north, (column + east) % shape[1]] for north, east in around], axis=1
    )
    target = np.broadcast_to(np.arange(len(row))[:, None], source.shape)
    return np.stack([source, target])[:, source >= 0]
