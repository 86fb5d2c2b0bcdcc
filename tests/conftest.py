"""A shell starts background processes with Ctrl-C ignored, and processes hand that down: the tests want it heard."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
