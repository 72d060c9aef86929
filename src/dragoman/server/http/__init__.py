"""HTTP/1.1: sockets, connections, parsing, responses, CORS and proxies."""
