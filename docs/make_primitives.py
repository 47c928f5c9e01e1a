"""Draw ``images/primitives.png``: the overview of the first tutorial, from a real run.

Run in the root of the repository: ``MPLBACKEND=Agg python docs/make_primitives.py``.
"""

import runpy
from pathlib import Path

HERE = Path(__file__).parent

tutorial = runpy.run_path(str(HERE / "tutorials" / "01_uneven_shards.py"), run_name="__main__")
tutorial["overview"].savefig(HERE / "images" / "primitives.png", dpi=200)
