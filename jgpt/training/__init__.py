"""The train step and what it needs: pure functions from batches to better weights."""
