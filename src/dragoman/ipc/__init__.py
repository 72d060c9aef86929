"""Runs engines and front ends in child processes.

A worker is a child process with one engine. It may crash, be killed or run out of memory: its requests fail, and the
server starts it again.

    worker_engine.py      the Engine that the server holds: passes calls on to the worker
    worker_supervisor.py  starts the worker, restarts it after a crash, kills it when it stalls
    worker_process.py     one running worker: sends requests, delivers events
    worker_main.py        the program of the worker: the real engine
    worker_messages.py    the messages on the pipe
    fatal_requests.py     requests that crashed a worker and are refused
    restart_backoff.py    the pause before a restart
    link.py               messages on a socket pair, for front ends
"""
