"""Pictures of models and runs: plots, and pages to look inside."""
