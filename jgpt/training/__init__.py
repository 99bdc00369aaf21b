"""Batches to better weights: pure functions of a train state."""
