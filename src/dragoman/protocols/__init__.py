"""Wire protocols: one folder each, with a server and a client side. `registry` has the table."""
