"""The page that holds a model: its numbers, computed in a browser. The door is `jgpt.look`."""
