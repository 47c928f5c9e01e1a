"""Derive ``data/ocean_3d.nc`` from NOAA's Ferret data sets.

    python examples/ocean_3d/make_data.py FOLDER

``FOLDER`` holds ``levitus_climatology.cdf`` and ``etopo60.cdf``, plain or compressed with xz.
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from scipy.io import netcdf_file

OUTPUT = Path(__file__).parent / "data" / "ocean_3d.nc"
MISSING = -(2**15)


def read(folder: Path, name: str, variable: str) -> tuple[np.ndarray, ...]:
    """Return the values of a variable, NaN if missing, and the values of its axes."""
    plain, packed = folder / f"{name}.cdf", folder / f"{name}.cdf.xz"
    content = plain.read_bytes() if plain.exists() else lzma.decompress(packed.read_bytes())
    with netcdf_file(io.BytesIO(content), mmap=False) as file:
        entry = file.variables[variable]
        values = entry.data.astype(np.float32)
        values[values == entry.missing_value] = np.nan
        axes = [file.variables[axis].data.astype(np.float32) for axis in entry.dimensions]
    return values, *axes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the Ferret data sets are")
    folder = parser.parse_args().folder

    temperature, depths, lat, lon = read(folder, "levitus_climatology", "TEMP")
    salinity = read(folder, "levitus_climatology", "SALT")[0][0]
    relief, relief_lat, relief_lon = read(folder, "etopo60", "ROSE")
    relief = np.roll(relief, -int(np.flatnonzero(relief_lon % 360 == lon[0] % 360)[0]), axis=1)
    sea = np.isfinite(temperature)
    if not np.array_equal(lat, relief_lat) or not np.array_equal(sea[0], np.isfinite(salinity)):
        raise SystemExit("the grids of temperature, salinity and relief differ")
    if (sea[1:] & ~sea[:-1]).any():
        raise SystemExit("there is sea below land")  # columns are prefixes of the levels

    row, column = np.nonzero(sea[0])
    # A coastal cell that is land on average gets the smallest depth.
    floor = np.maximum(-relief[row, column], 0)
    millidegrees = np.where(sea, np.round(1000 * temperature), MISSING)[:, row, column]
    with netcdf_file(OUTPUT, "w") as file:
        for name, size in (("level", len(depths)), ("water", len(row)), ("surface", 1)):
            file.createDimension(name, size)
        file.createVariable("depth", "f4", ("level",))[:] = depths
        for name, values in (("row", row), ("column", column), ("levels", sea.sum(axis=0)[sea[0]])):
            file.createVariable(name, "i2", ("water",))[:] = values
        for name, values in (("surface_salinity", salinity[sea[0]]), ("floor_depth", floor)):
            file.createVariable(name, "f4", ("surface", "water"))[:] = values
        entry = file.createVariable("millidegrees", "i2", ("level", "water"))
        entry[:] = millidegrees
        entry._FillValue = np.int16(MISSING)
    print(f"{len(row):,} columns of at most {len(depths)} levels, {sea.sum():,} sea cells")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
