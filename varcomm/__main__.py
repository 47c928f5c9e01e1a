"""``python -m varcomm``."""

import sys

from varcomm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
