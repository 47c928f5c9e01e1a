"""The look of all pictures of varcomm: one colour per rank, one style for light and dark pages.

Pictures are :data:`WIDTH` inches wide and have 200 dots per inch. A page shows them 720 pixels
wide, where their text is 11 points or larger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    *("CURVES", "DARKER", "INK", "LAND", "LINES", "ON_DARK", "PALE", "RANKS", "WIDTH", "WRONG"),
    *("darken", "rank_colours", "save", "style", "twin"),
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
#: Colours of a light page, and those of a dark one. Other colours stay, such as black text on the
#: colours of ranks.
ON_DARK = {
    **{"#ffffff": "#131416", INK: "#e6e9ec", PALE: "#a9b4be", WRONG: "#ff8a80", LAND: "#3b3f45"},
    **dict(zip(LINES, RANKS, strict=True)),
    **dict(zip(CURVES, ("#7fa6d6", "#d97fb0", "#66b877"), strict=True)),
}
_PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


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


def twin(path: Path) -> Path:
    """Return the file of the same picture for dark pages."""
    return path.with_stem(f"{path.stem}-dark")


def save(figure: Any, path: Path, fills: Mapping[str, str] | None = None) -> None:
    """Save a figure of this style, and its twin for dark pages beside it.

    `fills` are further colours, and those of the twin.
    """
    figure.savefig(path)
    darken(figure, fills)
    figure.savefig(twin(path))


def darken(figure: Any, fills: Mapping[str, str] | None = None) -> None:
    """Exchange the colours of :data:`ON_DARK` and `fills` in a figure."""
    from matplotlib.colors import ListedColormap, to_rgb, to_rgba_array

    pairs = [(to_rgb(old), to_rgb(new)) for old, new in {**ON_DARK, **(fills or {})}.items()]

    def exchanged(colours: Any) -> Any:
        before = to_rgba_array(colours)
        after = before.copy()
        for old, new in pairs:
            after[(abs(before[:, :3] - old) < 0.002).all(axis=1), :3] = new
        return after

    figure.set_layout_engine("none")  # each part stays at its place
    artists = figure.findobj()
    arrows = [getattr(artist, "arrow_patch", None) for artist in artists]  # of annotations
    for artist in (*artists, *arrows):
        for part in _PARTS:
            read = getattr(artist, f"get_{part}", None)
            if read is not None and len(found := exchanged(read())):
                getattr(artist, f"set_{part}")(found if len(found) > 1 else tuple(found[0]))
        listed = getattr(getattr(artist, "cmap", None), "colors", ())  # of ranks, or a long scale
        if 0 < len(listed) <= 2 * len(RANKS):
            artist.set_cmap(ListedColormap(exchanged(listed)))
