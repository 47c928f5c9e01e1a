"""``python -m varcomm bench``: varcomm beside bare schedules and beside other libraries."""
