"""One `x-request-id` in a reply: Ray Serve's proxy adds its own to every one, whatever is there already. The app's,
which is also the id in the body and in the event log, goes by another name."""

from typing import Any

from dragoman.server.asgi import Receive, Scope, Send

TAKEN = b"x-request-id"
OURS = b"x-dragoman-request-id"


class Renamed:
    """An ASGI app, but for that."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pass_on(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = message.get("headers", ())
                message = {**message, "headers": [(OURS if name == TAKEN else name, value) for name, value in headers]}
            await send(message)

        await self.app(scope, receive, pass_on)
