"""Ends a child process when its parent dies, even if the child is stuck.

Rules
1. On Linux the kernel sends a signal to the child when the thread that started it ends. Elsewhere a thread of the child
   polls the parent, which does not help if native code holds Python's lock.
2. A worker gets time to end by itself, because it also ends the processes that its engine started. Its signal handler
   is the C function `alarm`, which needs no lock: the number of the signal becomes the number of seconds after which
   SIGALRM ends the process.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
CHECK_SECONDS = 1.0


def kill_with_parent(parent: int) -> None:
    """Kill this process when the process with the id `parent` ends."""
    if sys.platform == "linux":
        _set_death_signal(signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(parent,), name="dragoman-parent", daemon=True).start()
    if os.getppid() != parent:
        # The parent ended before the watch began.
        os._exit(0)


def kill_after_parent() -> None:
    """Kill this process `SIGUSR2` (12) seconds after the end of its parent, if it has not ended by itself."""
    if sys.platform == "linux":
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
        libc.signal.restype = ctypes.c_void_p
        libc.signal(signal.SIGUSR2, ctypes.cast(libc.alarm, ctypes.c_void_p))
        _set_death_signal(signal.SIGUSR2)


def _set_death_signal(number: signal.Signals) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os._exit(0)
