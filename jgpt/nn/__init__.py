"""Tokens to logits: pure functions and modules of arrays."""
