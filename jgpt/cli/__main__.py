"""`python -m jgpt.cli`."""

from jgpt.cli import main

main()
