"""The engine for models that other servers run.

    options   configuration keys
    engine    chooses a server for each request, retries on another one, maps errors
    health    probes the servers
    pool      server selection: load, failures, prompt prefixes; no I/O
    server    one server: requests, rejected fields, available models

The engine connects only to configured addresses: it does not follow redirects, ignores proxy settings of the
environment, never fetches image URLs, and passes them on only if the configuration allows it.
"""
