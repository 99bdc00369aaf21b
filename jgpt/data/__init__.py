"""Modules that read text, encode it as tokens and draw batches."""
