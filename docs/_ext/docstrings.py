"""Convert docstrings, which are also read in a terminal, to reStructuredText.

Stars of shapes, such as ``(n, *F)``, do not start emphasis. References are numbered per docstring,
and a page has several docstrings. Types of arguments and results become links, and a collective has
its picture below the first line.
"""

import re
from functools import cache
from pathlib import Path

_STAR = re.compile(r"(``.*?``|`[^`]*`)|\*(?=[A-Z]\b)")
_REFERENCE = re.compile(r"(?<=\[)(\d+)(?=\]_)|(?<=^\.\. \[)(\d+)(?=\])")
_FIELD = re.compile(r"(Adjoint|Communication|In one process): ")
_PICTURES = Path(__file__).parents[1] / "images" / "collectives"

_TORCH = "https://docs.pytorch.org/docs/stable"
_ELSEWHERE = {
    "torch.Tensor": f"{_TORCH}/tensors.html",
    "torch.nn.Module": f"{_TORCH}/generated/torch.nn.Module.html",
    "torch.nn.Parameter": f"{_TORCH}/generated/torch.nn.parameter.Parameter.html",
    "torch.optim.Optimizer": f"{_TORCH}/optim.html#torch.optim.Optimizer",
    "torch.dtype": f"{_TORCH}/tensor_attributes.html#torch.dtype",
    "torch.device": f"{_TORCH}/tensor_attributes.html#torch.device",
    "ProcessGroup": f"{_TORCH}/distributed.html",
    "DeviceMesh": f"{_TORCH}/distributed.html#torch.distributed.device_mesh.DeviceMesh",
}
_ELSEWHERE["Tensor"] = _ELSEWHERE["torch.Tensor"]
_PATH = re.compile(r"~?(varcomm(?:\.\w+)+)")
_TYPE = re.compile(r"(?<![\w.`~])[A-Za-z][\w.]*")


@cache
def _own_types():
    """Return the documented classes of varcomm by their names."""
    found = {}
    for page in (Path(__file__).parents[1] / "reference").rglob("*.rst"):
        text = page.read_text()
        module = re.search(r"^\.\. currentmodule:: (\S+)$", text, re.MULTILINE)
        for name in re.findall(r"^\.\. autoclass:: (\w+)$", text, re.MULTILINE):
            found.setdefault(name, []).append(f"{module[1]}.{name}")
    return found


def _link(found, of):
    """Return the type with a link; if classes share a name, the class of the object's module."""
    name = found[0]
    own = _own_types().get(name, [])
    near = [one for one in own if of.startswith(one.rpartition(".")[0] + ".")]
    if near or len(own) == 1:
        return f":py:class:`~{max(near or own, key=len)}`"
    return f"`{name} <{_ELSEWHERE[name]}>`__" if name in _ELSEWHERE else name


def _linked(lines, of):
    """Yield the lines, with links in the types of arguments, attributes and results."""
    section = ""
    for place, line in enumerate(lines):
        if place + 1 < len(lines) and re.fullmatch("-{3,}", lines[place + 1]):
            section = line
        elif line and not line.startswith((" ", "-", "`", "{")):
            if section in ("Returns", "Yields"):
                line = _TYPE.sub(lambda found: _link(found, of), line)
            elif section in ("Parameters", "Attributes") and " : " in line:
                name, kind = line.split(" : ", 1)
                line = f"{name} : {_TYPE.sub(lambda found: _link(found, of), kind)}"
        yield line


def _paragraphs(lines):
    """Yield the lines, with a paragraph for each field of the notes."""
    before = ""
    for line in lines:
        if before and not before.startswith("-") and _FIELD.match(line):
            yield ""
        yield line
        before = line


def _picture(name, lines):
    """Return the directives that show the rows a collective moves."""
    short = name.rpartition(".")[2]
    if name != f"varcomm.{short}" or not (_PICTURES / f"{short}.svg").exists():
        return []
    words = f"Rows of three ranks before and after {short}. {lines[0]}"
    return ["", f".. image:: /images/collectives/{short}.svg", f"   :alt: {words}", ""]


def prepare(app, what, name, obj, options, lines):
    label = re.sub(r"\W", "_", name)
    lines[:] = _paragraphs(_linked(lines, name))
    for place, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        starred = _STAR.sub(lambda found: found[1] or r"\*", line)
        lines[place] = _REFERENCE.sub(lambda found: f"#{label}_{found[0]}", starred)
    lines[1:1] = _picture(name, lines)


def shorten(app, what, name, obj, options, signature, returns):
    """Return a signature whose types have no path if the reference does not document them."""
    documented = {path for paths in _own_types().values() for path in paths}

    def short(text):
        text = re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text or "")
        return _PATH.sub(
            lambda found: found[0] if found[1] in documented else found[1].rpartition(".")[2], text
        )

    return short(signature) or signature, short(returns) or returns


def setup(app):
    app.setup_extension("sphinx.ext.autodoc")
    # before napoleon, which makes the sections
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.connect("autodoc-process-signature", shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
