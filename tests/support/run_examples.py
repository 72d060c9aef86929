"""Runs the Python examples of a page of the documentation, one after the other, as scripts with globals of their own.

    python run_examples.py FILE...

`serve` does not block here: it asks the engines once, in process. The exit status is 1 if an example fails.
"""

import asyncio
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

import httpx

import dragoman
from dragoman.core.engine import list_models

KEY = {"authorization": "Bearer my-key"}
"""The API key in all examples."""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello."}]}
TEXTS: dict[str, Any] = {"input": ["Hello."]}


def answer_once(*engines: dragoman.Engine, host: str | None = None, port: int | None = None, **options: Any) -> None:
    asyncio.run(_answer_once(engines, options))


async def _answer_once(engines: tuple[dragoman.Engine, ...], options: dict[str, Any]) -> None:
    app = dragoman.create_app(*engines, **options)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=KEY) as client:
        for engine in engines:
            path, body = ("/v1/chat/completions", CHAT) if "chat" in engine.supports() else ("/v1/embeddings", TEXTS)
            response = await client.post(path, json={"model": list_models(engine)[0].name, **body})
            assert response.status_code == 200, response.text
    await app.stop()


def main() -> int:
    sys.path[0] = str(Path.cwd())
    dragoman.serve = answer_once
    has_failed = False
    for file in sys.argv[1:]:
        try:
            runpy.run_path(file, run_name="__main__")
        except Exception:  # noqa: BLE001 (reported, so that the others run too)
            traceback.print_exc()
            has_failed = True
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
