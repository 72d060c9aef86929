"""How the bytes of one response leave: the transport that uvicorn is given for it.

Rules
1. The head leaves in one write with the beginning of the body: one system call and one packet less for each response.
   The head of a response to HEAD, which nothing follows, leaves at once.
2. Nothing is written to a connection that is closing: uvloop raises where asyncio would drop the bytes.

uvicorn writes `[100 Continue] head piece*` and says with none of these calls which it is. A head is known by its first
bytes, which are the same in all of uvicorn's heads whatever version the client speaks; the interim response begins
with them too and must not wait. After the head everything is body, even what looks like a head.
"""

import asyncio

_HEAD = b"HTTP/1.1 "
_INTERIM = b"HTTP/1.1 100"


class ResponseTransport:
    def __init__(self, transport: asyncio.Transport, *, has_body: bool) -> None:
        self._transport = transport
        # None: not yet seen; empty: it has left.
        self._head: bytes | None = None if has_body else b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        if self.is_closing():
            return
        if self._head is None and data.startswith(_HEAD) and not data.startswith(_INTERIM):
            self._head = data
        elif self._head:
            self._transport.write(self._head + data)
            self._head = b""
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self.is_closing():
            return
        if self._head:
            self._transport.write(self._head)
        self._transport.close()
