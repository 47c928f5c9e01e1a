"""The look of all pictures of varcomm: one colour per rank, one style.

Pictures are :data:`WIDTH` inches wide and have 200 dots per inch. A page shows them 720 pixels
wide, where their text is 11 points or larger.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    *("CURVES", "DARKER", "INK", "LAND", "LINES", "PALE", "RANKS", "WIDTH", "WRONG"),
    *("rank_colours", "style"),
]

#: Paul Tol's light colours, which readers with any kind of colour vision distinguish, also at half
#: brightness. Ink on each of them has a contrast of 4.5:1 or more.
RANKS = (
    *("#77aadd", "#ee8866", "#eedd88", "#44bb99"),
    *("#ffaabb", "#bbcc33", "#99ddff", "#aaaa00"),
)
#: Brightness of the same colours for rows with copies, and for lines on white.
DARKER = 0.5
#: Text and lines; text of less weight; a fault. Each has a contrast of 5:1 or more on white.
INK, PALE, WRONG = "#1f2933", "#5f6b76", "#b3261e"
#: Curves and bars that are not ranks; Paul Tol's bright colours.
CURVES = ("#4477aa", "#aa3377", "#228833")
#: Land on maps, and wide lines behind others.
LAND = "#d5d1ca"
#: Inches of a picture.
WIDTH = 7.2

#: The colours of ranks for lines on white; those of dark pages are RANKS.
LINES = tuple(
    "#" + "".join(f"{round(0.62 * int(colour[at : at + 2], 16)):02x}" for at in (1, 3, 5))
    for colour in RANKS
)


def rank_colours(ranks: int, brightness: float = 1.0) -> list[tuple[float, float, float]]:
    """Return the red, green and blue of each rank, from 0 to 1.

    >>> rank_colours(2, DARKER)[0]
    (0.23333333333333334, 0.3333333333333333, 0.43333333333333335)
    """
    from matplotlib.colors import hsv_to_rgb, to_rgb

    found: list[Any] = [to_rgb(colour) for colour in RANKS[:ranks]]
    if ranks > len(RANKS):  # hues a golden angle apart
        found = [hsv_to_rgb((rank * 0.618034 % 1, 0.7, 0.9)) for rank in range(ranks)]
    return [
        (brightness * float(r), brightness * float(g), brightness * float(b)) for r, g, b in found
    ]


def style() -> Any:
    """Return parameters for ``matplotlib.rc_context`` or ``plt.rcParams``."""
    from cycler import cycler

    return {
        "figure.figsize": (WIDTH, 0.5 * WIDTH),
        "figure.dpi": 100,
        "savefig.dpi": 200,
        "figure.facecolor": "white",
        "savefig.facecolor": "auto",
        "axes.facecolor": "white",
        "font.size": 11,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.labelsize": 11,
        "xtick.labelsize": 11,
        "ytick.labelsize": 11,
        "legend.fontsize": 11,
        "figure.titlesize": 13,
        "figure.titleweight": "bold",
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.titlecolor": INK,
        "xtick.labelcolor": INK,
        "ytick.labelcolor": INK,
        "xtick.color": PALE,
        "ytick.color": PALE,
        "axes.edgecolor": PALE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=LINES),
        "legend.frameon": False,
        "lines.linewidth": 2,
        "image.cmap": "viridis",
        "svg.fonttype": "none",
    }
