"""Shapes: the contract, results inside a call, and proofs."""
