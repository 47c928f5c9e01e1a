"""Write ``reference/grid_functions.md``: torch's functions that run on fields, by kind.

After a change of the rules in ``varcomm.grid``, run ``python docs/make_grid_functions.py`` in the
root of the repository. ``tests/grid`` compares the page with ``varcomm.grid.functions()``.
"""

from pathlib import Path

import varcomm as vc
from varcomm.grid.field import RULES

PAGE = Path(__file__).with_name("reference") / "grid_functions.md"

# Kinds by the module or the name of a rule, in the order of the page, and their options.
KINDS = {
    "windows": (
        "Convolutions, pools, windows",
        "any kernel, stride, dilation, groups, output padding, `ceil_mode`, `count_include_pad`; "
        "padding in every mode of torch's modules, `same` included. No `return_indices`.",
    ),
    "resample": (
        "Resampling",
        "`size` or `scale_factor`; nearest, nearest-exact, linear, bilinear, bicubic, trilinear, "
        "area; `align_corners`. No `antialias`.",
    ),
    "norms": (
        "Norms",
        "in training and in evaluation, with running statistics; sums in fp32 at least.",
    ),
    "contractions": (
        "Products and attention",
        "along split or other dimensions; attention with masks, causal, grouped queries.",
    ),
    "fourier": ("Fourier transforms", "along split or other dimensions, any length `n` and `s`."),
    "reductions": (
        "Reductions, softmax, cumulative sums",
        "along split or other dimensions; sorting, medians and cumulative products along others.",
    ),
    "shapes": (
        "Shapes, rows, joins",
        "slices with steps, rolls and flips of a split dimension; reshapes that keep whole rows.",
    ),
    "_loss": ("Losses", "with `reduction=`, class weights and ignored classes."),
    "elementwise": (
        "Element-wise functions",
        "with operands in other sizes, which are aligned, and ordinary tensors.",
    ),
    "_in_place": ("In place", "on a field, without writing rows of others."),
    "others": ("Conversions, new tensors, derivatives", "new tensors are whole on every rank."),
}
OTHERS = {"_converted", "_ordinary", "_backward", "_grad"}
BY_NAME = {  # of functions that share a rule with others
    **dict.fromkeys(("lp_pool1d", "lp_pool2d", "lp_pool3d"), "windows"),
    "channel_shuffle": "resample",
    "local_response_norm": "norms",
    "multi_head_attention_forward": "contractions",
    "normalize": "reductions",
    "index_select": "shapes",
    "prelu": "elementwise",
}


def kind_of(name):
    """Return the key of a function's kind."""
    if name in BY_NAME:
        return BY_NAME[name]
    rule = RULES[name]
    if rule.__name__ in OTHERS:
        return "others"
    return rule.__name__ if rule.__name__ in KINDS else rule.__module__.rpartition(".")[2]


def page():
    """Return the text of the page."""
    lines = [
        "# Functions that run on fields",
        "",
        "A [field](../grids.md) runs these functions of torch, as functions, methods, operators "
        "and in modules. Outputs, gradients and second derivatives equal one process. Other "
        "functions raise `ArgumentError` with their name. Operators are named as their methods, "
        "without underscores: `x - 1` is `sub`, `1 - x` is `rsub`, `x[...]` is `getitem`.",
        "",
        "`docs/make_grid_functions.py` writes this page.",
        "",
    ]
    for kind, (title, options) in KINDS.items():
        names = [name for name in vc.grid.functions() if kind_of(name) == kind]
        lines += [f"## {title}", "", f"{options[0].upper()}{options[1:]}", ""]
        lines += [", ".join(f"`{name}`" for name in names), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
