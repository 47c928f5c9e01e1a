"""Engines, which move uneven bytes between ranks, and the choice of one for a tensor."""
