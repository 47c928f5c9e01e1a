"""Formulas as SVG outlines, which need no script and no font of the reader."""

from functools import cache
from html import escape

from docutils.nodes import SkipNode
from matplotlib.font_manager import FontProperties
from matplotlib.path import Path
from matplotlib.textpath import text_to_path

_SIZE = 100  # units per em of the formula
_SCALE = 1.2  # ems of the text per em of the formula, whose small letters are smaller
_FONT = FontProperties(family="DejaVu Serif", math_fontfamily="stix", size=_SIZE)
_LETTERS = {Path.MOVETO: "M", Path.LINETO: "L", Path.CURVE3: "Q", Path.CURVE4: "C"}
_POINTS = {Path.MOVETO: 1, Path.LINETO: 1, Path.CURVE3: 2, Path.CURVE4: 3}


def _outline(formula):
    """Return the path data of a formula, in units with y downwards."""
    points, codes = text_to_path.get_text_path(_FONT, f"${formula}$", ismath=True)
    parts, place = [], 0
    while place < len(codes):
        code = codes[place]
        if code == Path.CLOSEPOLY:
            parts.append("Z")
            place += 1
            continue
        count = _POINTS[code]
        values = (f"{x:.0f} {-y:.0f}" for x, y in points[place : place + count])
        parts.append(_LETTERS[code] + " ".join(values))
        place += count
    return "".join(parts)


@cache
def svg_of(formula):
    """Return a formula as an SVG element on the baseline of the text."""
    formula = " ".join(formula.split()).replace(r"^{\mathsf T}", r"^{\mathsf{T}}")
    width, height, depth = text_to_path.get_text_width_height_descent(
        f"${formula}$", _FONT, ismath=True
    )
    box = f"-4 {depth - height - 4:.0f} {width + 8:.0f} {height + 8:.0f}"
    em = _SCALE / _SIZE
    size = f"height:{(height + 8) * em:.2f}em;vertical-align:{-(depth + 4) * em:.2f}em"
    return (
        f'<svg class="formula" role="img" aria-label="{escape(formula)}" viewBox="{box}" '
        f'style="{size}"><path d="{_outline(formula)}"/></svg>'
    )


def inline(translator, node):
    translator.body.append(svg_of(node.astext()))
    raise SkipNode


def block(translator, node):
    formula = node.astext().replace(r"\frac", r"\dfrac")
    translator.body.append(f'<div class="math">{svg_of(formula)}</div>')
    raise SkipNode


def setup(app):
    app.add_html_math_renderer("svg", (inline, None), (block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
