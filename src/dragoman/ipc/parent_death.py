"""Ends a child process with its parent, even if the event loop of the child is stuck.

On Linux the kernel kills the child. On other systems a thread checks whether the parent still runs.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
CHECK_SECONDS = 1.0


def end_with_parent(parent: int) -> None:
    """Kill this process when its parent ends; `parent` is the parent's process id."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    else:
        threading.Thread(target=_watch, args=(parent,), name="dragoman-parent", daemon=True).start()
    if os.getppid() != parent:
        # The parent ended before the watch began.
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os._exit(0)
