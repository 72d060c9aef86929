"""The HTTP side: an ASGI app over the catalog.

app         create_app(), the route table, errors of every kind
exchange    one request and its response: headers, body, stream, disconnect
respond     from a generation's events to JSON or a stream of frames
listing     models, health, tokens
admin       the operator's: models loaded and unloaded, a new configuration
admin_token the credential for /admin where no keys are configured
upstreams   the operator's: the servers behind models
embedding   vectors, and documents in order
prompts     the prompt of what is not answered, and its tokens
responses   those that are kept, and the questions that refer to them
auth        who is asking
scopes      what a caller may ask for
jwt         signed tokens as keys
estimate    what a request may come to in tokens
cors        web pages of other origins
proxies     whose request it is, behind proxies
stats       metrics, and how everything stands
watch       what takes long: keep-alive comments, requests that are overdue, clients that leave
serve       the app in uvicorn
beforehand  what is looked at before that
acceptor    the connections of one listening socket
connection  one HTTP connection: requests are read, answered and written one after the other
http1       the framing of HTTP/1.1 requests, without I/O
bodies      the decoding of request bodies, large ones in a thread
writing     one request on its connection, and the writing of its response
"""
