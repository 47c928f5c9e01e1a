"""The configuration of the pages that ``make docs`` builds."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_ext"))

# Ranks of tutorials and examples have one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler prints nothing

from dark_twins import scraper  # noqa: E402

project = "varcomm"
author = "The varcomm developers"
copyright = author
release = version = "0.1"

extensions = [
    "breakable_names",
    "dark_twins",
    "docstrings",
    "glossary_links",
    "math_as_svg",
    "myst_parser",
    "pages_from_outside",
    "reference_tables",
    "search_words",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
# the gallery writes the pages of tutorials; their sources are not pages
exclude_patterns = ["_build", "_ext", "tutorials", "generated/tutorials/sg_execution_times.rst"]
nitpicky = True
# Without inventories of other projects, only varcomm's names are checked.
nitpick_ignore_regex = [("py:.*", r"(?!varcomm\.).*")]
# types of attributes, which have no page
PRIVATE = (
    *("data_parallel.sharded.shard.Piece", "graph.directory.Directory"),
    *("plan.routes.Routes", "transport.group.Group"),
)
nitpick_ignore = [("py:class", f"varcomm.{name}") for name in PRIVATE]
suppress_warnings = ["config.cache"]  # sphinx_gallery_conf has a function

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "signature"  # docstrings have the types in words, too
# names of types, which docstrings explain; without this their members would be shown
autodoc_type_aliases = {name: name for name in ("GroupLike", "TensorOrHandle")}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88  # longer ones have one argument per line
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autosummary_generate = False
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = False

html_theme = "furo"
html_title = "varcomm"
html_static_path = ["_static"]
html_css_files = ["varcomm.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "github-dark"
# prompts and results are not copied
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

sphinx_gallery_conf = {
    "examples_dirs": ["tutorials"],
    "gallery_dirs": ["generated/tutorials"],
    "filename_pattern": r"/\d\d_",
    "ignore_pattern": r"^_",
    "within_subsection_order": "FileNameSortKey",
    "abort_on_example_error": True,
    "show_memory": False,
    "min_reported_time": 1_000_000,
    "write_computation_times": False,
    "download_all_examples": False,
    "remove_config_comments": True,
    "capture_repr": (),
    "thumbnail_size": (800, 560),
    "image_scrapers": (scraper,),
}

html_math_renderer = "svg"
