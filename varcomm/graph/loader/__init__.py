"""Mini-batches of sampled neighbours, for models that run without exchanges."""
