"""For every test."""

import signal

# A runner started in the background ignores Ctrl-C, one started by nohup ignores a terminal that goes away, and so would
# every command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
