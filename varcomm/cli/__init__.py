"""The command line: ``python -m varcomm``."""
