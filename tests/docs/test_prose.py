"""Plain English. A page joins the list when it is rewritten."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "docs/explanation/architecture.md",
    "docs/checkpoints.md",
    "docs/coming_from/anemoi.md",
    "docs/coming_from/egnn.md",
    "docs/coming_from/fairchem.md",
    "docs/coming_from/fairscale.md",
    "docs/coming_from/index.md",
    "docs/coming_from/mace.md",
    "docs/coming_from/megatron.md",
    "docs/coming_from/meshgraphnet.md",
    "docs/coming_from/nanotron.md",
    "docs/coming_from/physicsnemo.md",
    "docs/coming_from/pyg.md",
    "docs/coming_from/torch_distributed_nn.md",
    "docs/reference/compatibility.md",
    "docs/compile.md",
    "docs/dtensor.md",
    "docs/failures.md",
    "docs/gradients.md",
    "docs/explanation/adjoints.md",
    "docs/explanation/conventions.md",
    "docs/explanation/fp32.md",
    "docs/explanation/halo.md",
    "docs/explanation/plans.md",
    "docs/how_to/read_only_the_rows_a_rank_owns.md",
    "docs/index.md",
    "docs/meshes.md",
    "docs/security.md",
    "docs/sharp_bits.md",
    "docs/start.md",
    "docs/tensor_parallel.md",
    "docs/transforms.md",
    "docs/tutorials/01_uneven_shards.py",
    "docs/tutorials/02_first_halo_exchange.py",
    "docs/tutorials/03_partition_a_mesh.py",
    "docs/tutorials/04_pyg_on_ranks.py",
    "docs/tutorials/05_forces.py",
    "docs/tutorials/06_nothing_divides.py",
    "docs/tutorials/07_sharded_gradients.py",
    "docs/tutorials/08_overlap.py",
    "docs/tutorials/09_cluster.py",
    "docs/tutorials/10_finding_a_hang.py",
    "examples/nodes/README.md",
    "examples/ocean/README.md",
    "examples/ocean_3d/README.md",
    "examples/poisson/README.md",
    "examples/resume/README.md",
    "examples/text/README.md",
    "examples/three_ways/README.md",
    "examples/weather/README.md",
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/how_to/*.md"))),
    *(str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("docs/troubleshooting/*.md"))),
]
COLUMNS = 84  # of code: wider lines are cut on the built page
WORDS = 30  # per sentence

AMOUNTS = "bytes|rows|messages|times|copy|file|thread|seconds?|m?s|[KMG]B"
HABITS = {
    "name the thing": r"\b(nobody|somebody|whoever|whatever)\b|^(What|Who|Where)\b[^?]*$",
    "software does not talk or know": r"\b(tells?|told|believed?|knows)\b",
    "write per": rf"\b({AMOUNTS}) an? (rank|row|step|layer|call|token|node|atom|second)\b",
    "return a noun": r"\bReturn (what|how|who|which)\b",
    "write inside or outside": r"\b(inside|outside) of\b",
    "write the plain word": r"\b(anew|mend|alike|shared out|under way|will do|nor|tell apart)\b",
    "write use": r"(?:^|[.:;] )Take (?!away)",
    "a heading is a task or a noun": r"^#+ (What|Where|Who|When)\b",
}


def text_of(page):
    """Return the prose and the code of a page, as lists of lines."""
    text = (ROOT / page).read_text()
    if page.endswith(".py"):
        opening, text = re.fullmatch(r'"""\n(.*?)"""\n(.*)', text, re.DOTALL).groups()
        blocks = re.findall(r"# %%\n((?:#[^\n]*\n)+)", text)
        prose = "\n\n".join(
            [opening, *(re.sub(r"^# ?", "", block, flags=re.M) for block in blocks)]
        )
        shown = re.sub(r"# sphinx_gallery_start_ignore.*?_end_ignore", "", text, flags=re.DOTALL)
        return prose, [line for line in shown.splitlines() if not line.startswith("#")]
    code = re.findall(r"^```\w+\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}\S.*", text, re.MULTILINE)
    prose = re.sub(r"^```.*?^```|^<!--.*?-->", "", text, flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"^( {4}|:::|:link).*", "", prose, flags=re.MULTILINE)
    return prose, [*"\n".join(code).splitlines(), *indented]


def sentences_of(prose):
    """Return the sentences of paragraphs, list items and table cells, without inline code."""
    prose = re.sub(r"``?[^`]+``?", "Code", prose)
    prose = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose)
    prose = re.sub(r"\n(?=[#|]|- |\d\. )|(?<=[|])\n|\|", "\n\n", prose)
    for paragraph in re.split(r"\n\s*\n", prose):
        yield from re.split(r"(?:(?<=[.!?:])|(?<=[.]\))) (?=[A-Z*])", " ".join(paragraph.split()))


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_plain(page):
    prose, _ = text_of(page)
    found = []
    for sentence in sentences_of(prose):
        found += [f"{why}: {sentence}" for why, sign in HABITS.items() if re.search(sign, sentence)]
        if len(sentence.split()) > WORDS:
            found.append(f"{len(sentence.split())} words: {sentence}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES)
def test_code_fits_the_page(page):
    _, code = text_of(page)
    assert [line for line in code if len(line) > COLUMNS] == []
