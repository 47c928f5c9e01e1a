"""varcomm beside bare schedules and other libraries: ``python benchmarks/compare.py``."""
