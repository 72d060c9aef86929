"""A program that takes the place of a coding agent. The tests put it on the PATH under the name of each agent.

It writes what it was given into the file $FAKE_AGENT_RECORD, asks the server that it finds there, prints the answer,
and exits with $FAKE_AGENT_EXIT. With $FAKE_AGENT_WAIT it waits for a signal first, and prints it.
"""

import json
import os
import re
import signal
import sys
import time
import urllib.request
from pathlib import Path
from types import FrameType

TEMPORARY = re.compile(r"(/[^\s\"':=]*/(?:dragoman-|tmp\.)\w+)")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+")
MODEL = re.compile(r"\bfor-agents\b")


def read_files(texts: list[str]) -> dict[str, str]:
    """The files in the temporary directories that the settings name, by their path there."""
    folders = {found[1] for text in texts for found in TEMPORARY.finditer(text)}
    files = [(file, Path(folder)) for folder in folders for file in Path(folder).rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_text() for file, folder in files}


def ask(texts: list[str], key: str) -> str:
    address = next(found[0] for text in texts if (found := ADDRESS.search(text)))
    model = next(found[0] for text in texts if (found := MODEL.search(text)))
    assert any(key in text for text in texts)
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{address}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def wait_for_signals() -> None:
    received: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number).name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, note)
    print("waiting", flush=True)
    while not received:
        time.sleep(0.01)
    # A second one would be a mistake.
    time.sleep(0.5)
    print(f"got {' '.join(received)}", flush=True)


def main() -> None:
    given = dict(os.environ)
    texts = [*sys.argv[1:], *(value for name, value in given.items() if not name.startswith("FAKE_AGENT_"))]
    files = read_files(texts)
    record = {"arguments": sys.argv[1:], "environment": given, "files": files}
    Path(given["FAKE_AGENT_RECORD"]).write_text(json.dumps(record))
    if "FAKE_AGENT_KEY" in given:
        print(ask([*texts, *files.values()], given["FAKE_AGENT_KEY"]), flush=True)
    if "FAKE_AGENT_WAIT" in given:
        wait_for_signals()
    code = int(given.get("FAKE_AGENT_EXIT", "0"))
    if code < 0:
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
