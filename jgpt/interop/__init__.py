"""Weights in other projects' formats."""
