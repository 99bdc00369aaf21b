"""Shapes: the contract, results inside a call, proofs."""
