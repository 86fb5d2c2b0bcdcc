"""A shell starts background processes with Ctrl-C ignored, and processes hand that down: the tests want it heard.

On a GPU the tests are for the kernels, and no self-test replaces these by their references.
"""

import os
import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ["FEDKERNELS_SELF_TEST"] = "0"
