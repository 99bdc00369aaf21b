"""Models from tokens to logits: pure functions and modules of arrays."""
