"""Other libraries that can do the same: one file each, imported only where they run."""
