"""The collectives, one file each; each stands beside its adjoint."""
