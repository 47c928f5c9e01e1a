"""Pictures of light pages get their twins on dark pages: ``NAME-dark.png`` beside ``NAME.png``."""

import re
from pathlib import Path

from dark import darken, twin
from matplotlib import pyplot as plt
from sphinx_gallery.scrapers import matplotlib_scraper
from sphinx_gallery.utils import scale_image

_IMAGE = re.compile(r'<img\b[^>]*\bsrc="([^"]*)"[^>]*>')
_GALLERY = "generated/tutorials/images"


def scraper(block, block_vars, gallery_conf):
    """Save the figures of a tutorial with their twins."""
    drawn = [plt.figure(number) for number in plt.get_fignums()]
    paths = block_vars["image_path_iterator"].paths
    before = len(paths)
    rst = matplotlib_scraper(block, block_vars, gallery_conf)
    for figure, path in zip(drawn, paths[before:], strict=True):
        darken(figure)
        figure.savefig(twin(Path(path)))
    return rst


def shrink(app):
    """Make the dark twins of the gallery's thumbnails, which show the first pictures."""
    size = app.config.sphinx_gallery_conf["thumbnail_size"]
    images = Path(app.srcdir, _GALLERY)
    for drawn in images.glob("*_001-dark.png"):
        name = drawn.name.replace("_001-dark", "_thumb-dark")
        scale_image(drawn, images / "thumb" / name, *size)


def pair(app, page, template, context, doctree):
    """Show each image of a page that has a twin on light pages only, and the twin on dark ones."""
    sources = {name: source for source, name in app.builder.images.items()}

    def both(found):
        name = Path(found[1]).name
        source = Path(sources.get(name, f"{_GALLERY}/{name}"))
        dark = twin(source)
        if not (app.srcdir / dark).exists():
            return found[0]
        shown = twin(Path(name)).name
        app.builder.images[str(dark)] = shown
        other = found[0].replace(name, shown)
        return _classed(found[0], "only-light") + _classed(other, "only-dark")

    if "body" in context:
        context["body"] = _IMAGE.sub(both, context["body"])


def _classed(tag, name):
    more = re.sub(r'(\bclass\s*=\s*")', rf"\1{name} ", tag)
    return more if more != tag else tag.replace("<img", f'<img class="{name}"', 1)


def setup(app):
    app.connect("builder-inited", shrink, priority=900)  # after the gallery
    app.connect("html-page-context", pair)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
