"""`python -m jgpt` is the command `jgpt`."""

import signal

# While the command is imported; its own handler comes then.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from jgpt.cli import main

if __name__ == "__main__":
    main()
