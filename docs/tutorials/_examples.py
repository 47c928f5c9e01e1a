"""Where the examples of this repository are; the gallery does not tell a tutorial where it is."""

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
