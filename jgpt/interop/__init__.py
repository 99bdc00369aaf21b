"""Weights in the formats of other projects."""
