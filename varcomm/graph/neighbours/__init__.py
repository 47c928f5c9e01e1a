"""Neighbours by position: ghosts, local search, and graphs of radius and nearest neighbours."""
