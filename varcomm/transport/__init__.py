"""Ranks, groups and engines: the only layer that calls torch.distributed's collectives."""
