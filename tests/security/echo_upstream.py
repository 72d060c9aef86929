"""An upstream server that repeats the credentials it was sent, in every form of error.

The last message of a request selects the answer:

    "status N"   an error of that status, whose message has the request's credentials in it
    "stream"     a stream that begins well and then has such an error
    "garbage"    a reply that is not JSON, with the credentials in it
    "redirect"   a redirect to an address with the credentials in it
    other        a reply without credentials

It also collects traces: what is sent to /v1/traces.
"""

import base64
import json
import re
from http import HTTPStatus

from tests.support.bad_server import BadServer, Script, answer, delta, frame, whole

TRACES = "/v1/traces"
_CREDENTIALS = re.compile(r"^(?:authorization|x-api-key): *(.*?)\r$", re.IGNORECASE | re.MULTILINE)


class EchoUpstream(BadServer):
    def __init__(self) -> None:
        super().__init__()
        self.credentials: list[str] = []
        """The credentials in the headers of requests, as sent and decoded."""
        self.play(self._answer)
        self.also(answer({"object": "list", "data": [{"id": "echo", "object": "model"}]}), path="/v1/models")
        self.also([whole(b"", content_type="application/x-protobuf")], path=TRACES)

    @property
    def traces(self) -> bytes:
        return b"".join(self.requests[TRACES])

    def _answer(self, head: str, body: bytes) -> Script:
        given = _CREDENTIALS.findall(head)
        logins = [value.removeprefix("Basic ") for value in given if value.startswith("Basic ")]
        given += [base64.b64decode(login).decode() for login in logins]
        self.credentials += given
        secrets = " ".join(given)
        asked = json.loads(body)["messages"][-1]["content"]
        words = asked if isinstance(asked, str) else asked[-1].get("text", "")
        match words.split():
            case ["status", status]:
                error = {"message": f"bad header: {secrets}", "type": secrets, "code": secrets}
                return answer({"error": error}, f"{status} {HTTPStatus(int(status)).phrase}")
            case ["stream"]:
                failure = {"error": {"message": f"bad header: {secrets}", "code": 400}}
                return [
                    whole(delta(role="assistant", content="one") + frame(failure), content_type="text/event-stream")
                ]
            case ["garbage"]:
                return [whole(f"<html>{secrets}</html>".encode(), content_type="text/html")]
            case ["redirect"]:
                return [whole(b"", "302 Found", "text/html", location=f"{self.url}/{secrets}")]
        message = {"role": "assistant", "content": "fine"}
        return answer({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
