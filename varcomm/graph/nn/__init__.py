"""What looks at the nodes of all ranks: normalisations, pools and readouts."""
