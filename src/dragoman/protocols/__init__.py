"""The wire protocols, a folder each, with the server and the client side; `registry` has the table."""
