"""Generation: from a prompt to the text that continues it."""
