"""Link the first use of each glossary term on a page to the glossary."""

import re

from docutils import nodes
from sphinx.addnodes import index, pending_xref

GLOSSARY = "explanation/glossary"
# each term, and its forms on pages
TERMS = {
    "rank": "ranks?",
    "shard": "shards?",
    "halo": "halos?|ghost (?:cells?|nodes?)",
    "plan": "(?<!to )plans?(?! a)",
    "adjoint": "adjoints?",
    "owned": "owned",
    "cut edge": "cut edges?",
    "partition": "(?<!to )partitions?",
    "engine": "engines?",
    "replicated": "replicated",
    "primitive": "primitives?",
}
# pages on which a term has another meaning: SLURM's partitions, plans of tensor parallelism
OTHER_MEANINGS = {
    "partition": ("how_to/run_on_slurm", "generated/tutorials/09_cluster"),
    "plan": (
        *("how_to/shard_a_transformers_model", "how_to/shard_uneven_heads", "tensor_parallel"),
        "generated/tutorials/06_nothing_divides",
    ),
}
FLOWING = (nodes.paragraph, nodes.section, nodes.document, nodes.list_item, nodes.bullet_list)


def texts_of(document):
    """Yield the plain text of paragraphs and lists, without links, code and emphasis."""
    for text in list(document.findall(nodes.Text)):
        place = text.parent
        while isinstance(place, FLOWING) and place is not document:
            place = place.parent
        if place is document and isinstance(text.parent, nodes.paragraph):
            yield text


def link_first_uses(app, document):
    if app.env.docname == GLOSSARY:
        for node in document.findall(index):
            node["entries"] = []  # otherwise the search lists the glossary before pages
    if app.env.docname in (GLOSSARY, "generated/changelog"):
        return
    for term, words in TERMS.items():
        if app.env.docname in OTHER_MEANINGS.get(term, ()):
            continue
        for text in texts_of(document):
            if found := re.search(rf"(?<![-\w])(?:{words})(?![-\w])", text):
                link = pending_xref(
                    "", nodes.inline("", found[0]), refdomain="std", reftype="term",
                    reftarget=term, refdoc=app.env.docname, refexplicit=True, refwarn=True,
                )  # fmt: skip
                parts = nodes.Text(text[: found.start()]), link, nodes.Text(text[found.end() :])
                text.parent.replace(text, [part for part in parts if part.astext()])
                break


def setup(app):
    app.connect("doctree-read", link_first_uses)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
