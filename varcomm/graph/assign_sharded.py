def assign_sharded(*a, **k):
    raise RuntimeError
