"""For every test."""

import os
import signal
import sys

# A runner started in the background ignores Ctrl-C, one started by nohup ignores a terminal that goes away, and so would
# every command that tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Bytecode is kept, whatever the environment says: else each worker, and each command that a test starts, compiles every
# module again. It lies in folders that git ignores.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
