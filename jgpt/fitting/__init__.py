"""Training runs, from a config to a trained model on disk."""
