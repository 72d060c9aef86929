"""Several processes that clients talk to, and one that has the models.

    parent      the catalog, the engines, keys' quotas, kept responses, telemetry, the operator's routes
    front ends  connections, HTTP, JSON, who is asking, the stages, frames: most of the work, and no state

    messages.py  what goes between them
    link.py      one socket pair with messages on it
    front.py     a front end's door: what it answers itself, and what it has its parent answer
    remote.py    the parent's models, quotas and kept responses, as a front end sees them
    main.py      the process of a front end
    orphan.py    ends a child process with its parent, even if its event loop is stuck
    desk.py      the parent's side of one front end
    guests.py    a request of a front end, and what it holds
    passing.py   a request that the parent answers for a front end
    crew.py      all of them: started, started again, told of a new configuration, ended
    places.py    the sockets that they listen on

Rules
1. A front end that dies takes its connections with it and nothing else: its requests are cancelled at once, what they
   held is given back, and another takes its place. Connections that nobody has taken yet wait for it.
2. A parent that dies, even by kill -9, leaves no front end behind.
3. Events of a generation pass through the parent as they are: it looks at the key and no further.
"""
