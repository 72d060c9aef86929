"""Talks to child processes: workers, which run engines, and front ends, which serve clients.

A worker may crash, be killed or run out of memory: its requests fail, and the server starts it again.

    framing.py        one message after the other on a connection
    messages.py       the messages; replicas of Ray Serve get the same ones
    child_process.py  starts, watches, restarts and kills a child process
    engine_client.py  sends requests to an engine in another process and delivers what comes back
    worker_engine.py  the Engine that the server holds for a worker
    worker_main.py    the program of a worker, which answers them
"""
