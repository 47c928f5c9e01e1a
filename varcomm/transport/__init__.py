"""Ranks, groups and engines: the only room that knows torch.distributed's collectives."""
