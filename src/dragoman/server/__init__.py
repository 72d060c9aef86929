"""The HTTP side: an ASGI app over the catalog.

app.py       create_app(), the route table, errors of every kind
exchange.py  one request and its response: headers, body, stream, disconnect
respond.py   from a generation's events to JSON or a stream of frames
listing.py   models, health, tokens
auth.py      who is asking
watch.py     silence: keep-alive comments and engines that stall
serve.py     the app in uvicorn
connection.py  what uvicorn's HTTP connection does not guard against by itself
"""
