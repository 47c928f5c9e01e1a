"""Derive ``data/coads_2deg.nc`` from NOAA's Ferret data sets.

    python examples/weather/make_data.py FILE

``FILE`` is ``coads_climatology.cdf``, plain or compressed with xz.
"""

import argparse
import io
import lzma
from pathlib import Path

import numpy as np
from scipy.io import netcdf_file

OUTPUT = Path(__file__).parent / "data" / "coads_2deg.nc"
# Offset of each variable; the file has hundredths of the unit, as int16.
ZERO = {"SST": 0, "AIRT": 0, "SPEH": 0, "WSPD": 0, "UWND": 0, "VWND": 0, "SLP": 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, help="coads_climatology.cdf or coads_climatology.cdf.xz")
    path = parser.parse_args().file

    content = path.read_bytes()
    content = lzma.decompress(content) if path.suffix == ".xz" else content
    with netcdf_file(io.BytesIO(content), mmap=False) as file:
        lat, lon = (file.variables[axis].data.astype(np.float32) for axis in ("COADSY", "COADSX"))
        values, known = {}, np.ones((len(lat), len(lon)), bool)
        for name in ZERO:
            entry = file.variables[name]
            values[name] = entry.data.astype(np.float64)  # (12, lat, lon)
            known &= (entry.data != entry.missing_value).all(axis=0)

    row, column = np.nonzero(known)
    counted = {
        name: np.rint(100 * (values[name][:, known] - zero)).astype(np.int64)
        for name, zero in ZERO.items()
    }
    if max(np.abs(counts).max() for counts in counted.values()) >= 2**15:
        raise SystemExit("hundredths do not fit into int16")
    with netcdf_file(OUTPUT, "w") as file:
        file.createDimension("month", 12)
        file.createDimension("cell", len(row))
        for name, values in {"lat": lat[row], "lon": lon[column]}.items():
            file.createVariable(name, "f4", ("cell",))[:] = values
        for name, counts in counted.items():
            entry = file.createVariable(name.lower(), "i2", ("month", "cell"))
            entry[:] = counts
            entry.scale_factor = 0.01
    print(f"{len(row):,} cells with all of {', '.join(ZERO)} in all months")
    print(f"{OUTPUT}: {OUTPUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
