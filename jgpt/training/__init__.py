"""The train step, its state and its optimizer: pure functions from batches to better weights."""
