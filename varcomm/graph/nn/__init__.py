"""Normalisations, pools and readouts over the nodes of all ranks."""
