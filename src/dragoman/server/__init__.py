"""The HTTP server: an ASGI app over the model catalog.

app               the app with all state; `base_app` is shared with front ends
factory           build_app() and create_app()
serve             runs the app until a signal stops it
routes            the route table; `routing` finds a route by path and method
http_exchange     one request; `response_writer` writes its response, `deadlines` limits its time
model_lease       a lease on a model: name, permission, quota, slot, engine
preflight_checks  checks before the server starts
handlers          the handlers of the routes
auth              keys, tokens, scopes and quotas
http              sockets, connections and HTTP/1.1
telemetry         event log, metrics and traces
frontends         several processes that accept connections for one parent
"""
