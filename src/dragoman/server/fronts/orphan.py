"""A child process ends with its parent, even where its event loop is stuck.

On Linux the kernel kills it. Elsewhere a thread looks whether the parent is still there.
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
    """Kill this process when the one with this id ends. `parent` is the process that started this one."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
    else:
        threading.Thread(target=_watch, args=(parent,), name="dragoman-parent", daemon=True).start()
    if os.getppid() != parent:
        # It ended before it was watched.
        os._exit(0)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(CHECK_SECONDS)
    os._exit(0)
