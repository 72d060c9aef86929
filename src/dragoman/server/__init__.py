"""The HTTP server: an ASGI app over the model catalog.

app               the app with all state; `base_app` is shared with front ends
routes            the route table, and create_app()
serve             runs the app until a signal stops it
http_exchange     one request: its time limits, its body and its response
hooks             callables of the application for every generation
model_lease       a lease on a model: name, permission, quota, slot, engine
preflight_checks  checks before the server starts
handlers          the handlers of the routes
auth              keys, tokens, scopes and quotas
http              sockets, connections and HTTP/1.1
telemetry         event log, recordings, metrics and traces
frontends         several processes that accept connections for one parent
"""
