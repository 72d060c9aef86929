"""A model server for tests of agents and clients: it plays a script over HTTP, and keeps the requests that it gets.

    with serve_script(["It is sunny."]) as server: ...

plugin             the pytest fixture `model_server`
server             the server, in a thread of the test process
replies            the replies of a script
engine             plays them in order, and checks that they fit the requests
received_request   the requests of the agent
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dragoman.testing.received_request import ReceivedRequest as ReceivedRequest
    from dragoman.testing.replies import PlannedReply as PlannedReply
    from dragoman.testing.replies import call as call
    from dragoman.testing.replies import error as error
    from dragoman.testing.replies import reply as reply
    from dragoman.testing.server import ModelServer as ModelServer
    from dragoman.testing.server import serve_script as serve_script

PUBLIC = {
    "ModelServer": "dragoman.testing.server",
    "PlannedReply": "dragoman.testing.replies",
    "ReceivedRequest": "dragoman.testing.received_request",
    "call": "dragoman.testing.replies",
    "error": "dragoman.testing.replies",
    "reply": "dragoman.testing.replies",
    "serve_script": "dragoman.testing.server",
}
"""Imported when first used: pytest imports this package for its plugin, whether or not a test uses it."""

__all__ = ["ModelServer", "PlannedReply", "ReceivedRequest", "call", "error", "reply", "serve_script"]


def __getattr__(name: str) -> Any:
    if name in PUBLIC:
        return getattr(importlib.import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'dragoman.testing' has no attribute {name!r}")
