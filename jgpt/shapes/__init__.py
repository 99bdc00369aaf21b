"""Shapes: checked, written down and proven; a library of its own, which imports nothing of jgpt.

Its door is `typed` and `check` (contract), `prove` (proofs), `shape_trace` (trace),
`annotated_source` (source), `capture` and `edit` (capture), and `watching` (calls).
"""
