"""Pictures of models and runs: plots, and pages that show a model's inside."""
