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
        "Kernel size, stride, dilation, `groups`, `output_padding`, `ceil_mode` and "
        "`count_include_pad` may have any value. All padding modes of torch's modules work, and "
        'so does `padding="same"`. `return_indices=True` raises an error.',
    ),
    "resample": (
        "Resampling",
        "`interpolate` accepts `size` or `scale_factor`, `align_corners`, and the modes nearest, "
        "nearest-exact, linear, bilinear, bicubic, trilinear and area. `antialias=True` raises an "
        "error.",
    ),
    "norms": (
        "Norms",
        "Norms work in training and in evaluation mode. In training, they update running "
        "statistics. Statistics of fp16 and bf16 inputs are computed in fp32.",
    ),
    "contractions": (
        "Products and attention",
        "A product may sum over a split dimension or over any other dimension. Attention accepts "
        "masks, `is_causal=True` and grouped queries (`enable_gqa=True`).",
    ),
    "fourier": (
        "Fourier transforms",
        "A transform may run along a split dimension or along any other dimension, with any length "
        "`n` or lengths `s`.",
    ),
    "reductions": (
        "Reductions, softmax, cumulative sums",
        "Most of these functions accept a split dimension. Only dimensions that are not split are "
        "accepted by `argsort`, `cummax`, `cummin`, `cumprod`, `glu`, `kthvalue`, `median`, "
        "`nanmedian`, `sort` and `topk`.",
    ),
    "shapes": (
        "Shapes, rows, joins",
        "A split dimension may be sliced (also with a step), rolled and flipped. A reshape may not "
        "join two split dimensions, and a new row may not contain elements of two samples or "
        "channels.",
    ),
    "_loss": (
        "Losses",
        "Losses accept `reduction=`, class weights (`weight=`) and ignored classes "
        "(`ignore_index=`).",
    ),
    "elementwise": (
        "Element-wise functions",
        "Operands may be fields with different numbers of rows per rank. The result is split "
        "like the first operand, and ranks exchange the rows of the others. An operand that is an "
        "ordinary tensor must be complete on every rank.",
    ),
    "_in_place": (
        "In place",
        "These functions change this rank's rows of a field. Writing into rows that a rank has "
        "fetched, such as `x[:, :, 0]`, raises an error.",
    ),
    "others": (
        "Conversions, new tensors, derivatives",
        "New tensors, such as those of `new_zeros`, are ordinary tensors. They have their full "
        "shape on every rank.",
    ),
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
        "These functions of torch run on a [field](../grids.md). Call them as functions, methods "
        "or operators, or in modules. Outputs, gradients and second derivatives equal those of "
        "one process. Every other function raises an `ArgumentError` that names the function. "
        "Operators are listed under the names of their methods, without underscores: `x - 1` is "
        "`sub`, `1 - x` is `rsub`, `x[...]` is `getitem`.",
        "",
        "`docs/make_grid_functions.py` writes this page.",
        "",
    ]
    for kind, (title, options) in KINDS.items():
        names = [name for name in vc.grid.functions() if kind_of(name) == kind]
        lines += [f"## {title}", "", options, ""]
        lines += [", ".join(f"`{name}`" for name in names), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
