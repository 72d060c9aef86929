"""Jobs: requests that the server answers for a caller who does not wait."""

import asyncio
import json

from dragoman import create_app
from dragoman.config.settings import Settings
from dragoman.engines.scripted import ScriptedEngine
from dragoman.server.app_calls import RequestJob, call_app, job_scope
from dragoman.server.auth.callers import Caller
from tests.support.requests import CHAT, HELLO

KEYED = Settings(api_keys=("sk-0123456789abcdef",), hosts=("example.org",))
JOB = RequestJob(Caller("user:anna"), "job-1")


def ask(job: RequestJob, **fields: object) -> tuple[int, bytes, bytes]:
    """Run a chat as a job; return its status, its body, and the parts of its body that came early."""

    async def run() -> tuple[int, bytes, bytes]:
        app = create_app(ScriptedEngine(), settings=KEYED)
        parts: list[bytes] = []

        async def keep(part: bytes) -> None:
            parts.append(part)

        body = json.dumps({"messages": HELLO, **fields}).encode()
        reply = await call_app(app, job_scope(job, CHAT), body, asyncio.Event(), keep if "stream" in fields else None)
        await app.stop()
        return reply.status, reply.body, b"".join(parts)

    return asyncio.run(run())


def test_a_job_needs_no_key_and_has_the_id_of_its_request() -> None:
    status, body, _ = ask(JOB)
    assert status == 200
    assert json.loads(body)["id"] == "job-1"


def test_a_streamed_job_passes_its_frames_on() -> None:
    status, body, parts = ask(JOB, stream=True)
    assert (status, body) == (200, b"")
    assert parts.endswith(b"data: [DONE]\n\n")


def test_a_job_may_do_only_what_its_caller_may() -> None:
    status, body, _ = ask(RequestJob(Caller("user:anna", routes=frozenset({"embeddings"})), "job-1"))
    assert status == 403
    assert "chat routes" in json.loads(body)["error"]["message"]
