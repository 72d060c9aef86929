"""Any engine in a child process, behind the same interface.

The child can crash, be killed or run out of memory; the server sees a request that failed and a child to start again.

    parent.py    the Engine that the server holds: starts the child, and another when it has died
    process.py   one child as the server sees it: passes requests on, hands events out
    child.py     what runs in the child: the real engine, and one message per step for all that it made
    deaths.py    how long to wait before another is started
    fatal_requests.py  requests that crashed the child, and that are refused
    messages.py  what goes over the pipe
"""
