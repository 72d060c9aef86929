"""The Python client for any server that speaks chat completions, Responses or Messages.

sync_client, async_client    `Client` and `AsyncClient`, built on httpx
async_transport              sends calls with httpx.AsyncClient; also used by the upstream engine
http_transport               a fast HTTP/1.1 transport for httpx; used by the upstream engine and the load test
planner                      chooses protocols and retries, without I/O
call                         one request and its reply, without I/O: bytes in, events out
rest_calls                   lists of models, embeddings and token counts
options, message_dicts       arguments of the clients, converted to `GenerationRequest`
python_types, tool_loop      Python types as JSON schemas, Python functions as tools
addresses                    the server and the key from the environment
http_settings                settings and errors of httpx, decompression
"""
