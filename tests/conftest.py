"""For every test."""

import signal

# A runner started in the background ignores Ctrl-C, and so would every command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
