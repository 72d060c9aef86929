"""Serves clients from several processes in front of one process that holds the models.

    parent      catalog, engines, quotas of keys, stored responses, telemetry, operator routes
    front ends  connections, HTTP, JSON, authentication, pipeline, frames: most of the work, without state

    messages.py          the messages between them
    process.py           the process of a front end: what it answers itself and what it relays to the parent
    remote.py            the parent's models, quotas, stored responses and telemetry, as seen by a front end
    request_handlers.py  what a request of a front end holds in the parent, and the messages about it
    supervisor.py        connects, restarts, configures and stops the front ends

Rules
1. A front end that dies takes only its own connections with it. Its requests are cancelled, their resources are
   released, and another front end is started. Connections that were not accepted yet wait for it.
2. When the parent dies, even by kill -9, the front ends end too.
3. The parent forwards the events of a generation without decoding them; it reads only the key.
"""
