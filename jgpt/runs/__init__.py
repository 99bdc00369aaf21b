"""One run: its directory, its checkpoints, its metrics, and the loop that makes them."""
