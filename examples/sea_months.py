"""The months of the examples `weather` and `weather_grid`: the file, the task and its errors.

The task is to predict the change of the surface temperature of the sea from one month to the next.
Your own programs do not need this module.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

FILE = Path(__file__).parent / "weather" / "data" / "coads_2deg.nc"
FIELDS = ("sst", "airt", "speh", "wspd", "uwnd", "vwnd", "slp")
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
HELD_OUT = (1, 5, 9)  # February, June and October: training does not use them
SEEN = [month for month in range(12) if month not in HELD_OUT]
# A forecast starts at a month and predicts the next; December comes before January.
TEST = [(month - 1) % 12 for month in HELD_OUT]
TRAIN = [month for month in SEEN if (month + 1) % 12 in SEEN]


def insolation(lat: np.ndarray) -> np.ndarray:
    """Return the daily mean insolation without an atmosphere, (12, G), relative to the zenith."""
    day = 365 * (np.arange(12)[:, None] + 0.5) / 12
    tilt = np.deg2rad(-23.44) * np.cos(2 * np.pi * (day + 10) / 365)
    phi = np.deg2rad(lat)
    noon = np.arccos(np.clip(-np.tan(phi) * np.tan(tilt), -1, 1))  # from there to sunset
    high, low = np.cos(phi) * np.cos(tilt), np.sin(phi) * np.sin(tilt)
    return (noon * low + np.sin(noon) * high) / np.pi


def baselines(sst: np.ndarray) -> dict[str, np.ndarray]:
    """Return changes (12, G), in deg C, of baselines by name, from temperatures (12, G)."""
    angle = 2 * np.pi * np.arange(12) / 12
    waves = np.stack([np.ones(12), np.cos(angle), np.sin(angle)], axis=1)
    yearly = waves @ np.linalg.lstsq(waves[SEEN], sst[SEEN], rcond=None)[0]
    return {
        "persistence: no change": np.zeros_like(sst),
        "mean of the cell over training months": sst[SEEN].mean(axis=0) - sst,
        "a yearly wave through the cell's training months": np.roll(yearly, -1, axis=0) - sst,
    }


def errors(changes: dict[str, np.ndarray], rmse: Callable[[np.ndarray], np.ndarray]) -> str:
    """Return a table of errors in deg C, with a column per held-out month, which `rmse` returns."""
    months = [MONTHS[month] for month in HELD_OUT]
    lines = [f"RMSE in deg C   {'  '.join(f'{month:>5}' for month in [*months, 'all'])}"]
    for name, change in changes.items():
        each = rmse(change)
        columns = [*each, np.sqrt(np.mean(each**2))]
        lines.append(f"{'':16}{'  '.join(f'{error:5.2f}' for error in columns)}  {name}")
    return "\n".join(lines)
