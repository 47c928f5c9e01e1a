"""Derive ``data/ocean_1deg.npz`` from NOAA's Ferret data sets.

    python examples/ocean/make_data.py FOLDER

``FOLDER`` holds ``levitus_climatology.cdf`` and ``etopo60.cdf``, plain or compressed with xz.
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from scipy.io import netcdf_file

OUTPUT = Path(__file__).parent / "data" / "ocean_1deg.npz"


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


def mask_agreement(sea: np.ndarray, relief: np.ndarray, columns: int) -> float:
    """Return the correlation of two sea masks, the second shifted eastwards by some columns."""
    below = np.roll(relief < 0, columns, axis=1)
    return float(np.corrcoef(sea.ravel(), below.ravel())[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the Ferret data sets are")
    folder = parser.parse_args().folder

    temperature, depths, lat, lon = read(folder, "levitus_climatology", "TEMP")
    salinity = read(folder, "levitus_climatology", "SALT")[0]
    relief, relief_lat, relief_lon = read(folder, "etopo60", "ROSE")

    # The two grids have the same cells, but either may begin at another meridian.
    turn = int(np.flatnonzero(relief_lon % 360 == lon[0] % 360)[0])
    relief = np.roll(relief, -turn, axis=1)
    sea = np.isfinite(temperature[0]) & np.isfinite(salinity[0])
    agreement = [mask_agreement(sea, relief, columns) for columns in range(len(lon))]
    # Axes can be labelled wrongly; coasts cannot.
    if not np.array_equal(lat, relief_lat) or np.argmax(agreement) != 0:
        raise SystemExit(f"the grids are not aligned: best at {np.argmax(agreement)} columns east")

    row, column = np.nonzero(sea)
    level = int(np.flatnonzero(depths == 400)[0])
    np.savez_compressed(
        OUTPUT,
        lat=lat[row],
        lon=lon[column],
        surface_temperature=temperature[0][sea],
        surface_salinity=salinity[0][sea],
        temperature_400m=temperature[level][sea],
        # A coastal cell that is land on average gets the smallest depth.
        floor_depth=np.maximum(-relief[sea], 0),
    )
    print(f"{len(row):,} sea cells, {np.isfinite(temperature[level][sea]).sum():,} reach 400 m")
    print(f"land masks correlate at {agreement[0]:.3f}, turned by 1 column {agreement[1]:.3f}")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
