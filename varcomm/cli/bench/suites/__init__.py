"""What is measured: one file a suite."""
