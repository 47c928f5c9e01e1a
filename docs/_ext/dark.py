"""Pictures of varcomm's style for dark pages: ``NAME-dark.png`` beside ``NAME.png``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.colors import ListedColormap, to_rgb, to_rgba_array
from matplotlib.text import Text
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from varcomm._figures import CURVES, INK, LAND, LINES, PALE, RANKS, WRONG

#: Colours of a light page, and those of a dark one. Other colours stay, such as black text on the
#: colours of ranks.
ON_DARK = {
    **{"#ffffff": "#131416", INK: "#e6e9ec", PALE: "#a9b4be", WRONG: "#ff8a80", LAND: "#3b3f45"},
    **dict(zip(LINES, RANKS, strict=True)),
    **dict(zip(CURVES, ("#7fa6d6", "#d97fb0", "#66b877"), strict=True)),
}
_PARTS = ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor")


def twin(path: Path) -> Path:
    """Return the file of the same picture for dark pages."""
    return path.with_stem(f"{path.stem}-dark")


def save(
    figure: Any,
    path: Path,
    fills: Mapping[str, str] | None = None,
    numbers: object = None,
    colours: int | None = None,
) -> None:
    """Save a figure of this style, and its twin for dark pages beside it.

    `fills` are further colours, and those of the twin. The files keep the words of the picture as
    their description and the `numbers` as JSON, which tests compare with pages. With 64 `colours`,
    a file has a fifth of the bytes.
    """
    texts = (artist.get_text() for artist in figure.findobj(Text))
    words = {"Description": "\n".join(filter(None, texts)), "numbers": json.dumps(numbers)}
    figure.savefig(path, metadata=words)
    darken(figure, fills)
    figure.savefig(twin(path), metadata=words)
    for file in (path, twin(path)) if colours else ():
        _reduce(file, colours)


def _reduce(path: Path, colours: int) -> None:
    """Reduce the colours of a picture, and keep its words."""
    image: Any = Image.open(path)
    words = PngInfo()
    for name, text in image.text.items():
        words.add_text(name, text)
    small = image.convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    small.save(path, optimize=True, pnginfo=words)


def darken(figure: Any, fills: Mapping[str, str] | None = None) -> None:
    """Exchange the colours of :data:`ON_DARK` and `fills` in a figure."""
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
