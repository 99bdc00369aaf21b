"""`python -m jgpt` is the command `jgpt`."""

from jgpt.cli import main

main()
