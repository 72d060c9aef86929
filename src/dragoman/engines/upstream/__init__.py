"""The engine for models that other servers run.

    options           configuration keys
    engine            chooses a server for each request and retries on another one
    upstream_server   one server: requests, rejected fields, available models
    field_support     adapts a request to the fields that a protocol and a server support
    pool              server selection: load, failures, prompt prefixes; no I/O
    prefix_index      which server has computed which prompt prefix
    error_mapping     maps errors of a server to our errors

The engine connects only to configured addresses: it does not follow redirects, ignores proxy settings of the
environment, never fetches image URLs, and passes them on only if the configuration allows it.
"""
