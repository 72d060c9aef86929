"""Opens a WebSocket. Its request is answered like a GET, with the same routes, keys and errors.

    GET of the app                   message of the WebSocket
    101                              websocket.accept
    another status, with a body      websocket.http.response.start, websocket.http.response.body
                                     websocket.close, if the server cannot send a response

Rules
1. The route decides, by sending a 101. The request ends with it, and is recorded then.
2. The session on the connection begins when its request has ended.
"""

from dragoman.server.http.response import Message, Receive, Scope, Send

WEBSOCKET = "dragoman.websocket"
"""The extension of the ASGI scope of a GET that opens a WebSocket."""


class HandshakeRequest:
    """The request of a WebSocket as a GET."""

    is_accepted = False

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self._can_answer = "websocket.http.response" in scope.get("extensions", {})
        self.scope: Scope = {**scope, "type": "http", "method": "GET", "extensions": {WEBSOCKET: True}}

    async def receive(self) -> Message:
        # Nothing but a disconnect comes before the reply.
        await self._receive()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if message.get("status") == 101:
            self.is_accepted = True
            await self._send({"type": "websocket.accept", "headers": list(message["headers"])})
        elif self.is_accepted:
            # The empty body of the 101.
            return
        elif self._can_answer:
            await self._send({**message, "type": f"websocket.{message['type']}"})
        elif message["type"] == "http.response.start":
            await self._send({"type": "websocket.close"})
