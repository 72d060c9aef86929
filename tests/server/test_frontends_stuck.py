"""A front end whose event loop is stuck is replaced, and ends with its parent."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.test_shutdown_and_logs import gone
from tests.support.requests import COMPLETIONS, PATIENCE, ask, eventually, talking, text_of
from tests.support.server_process import Running, serving


class TestStuckFrontEnd:
    """A front end that got SIGSTOP stands for one whose event loop is stuck: it reads and answers nothing."""

    @pytest.fixture
    def pair(self, tmp_path: Path) -> Iterator[Running]:
        config = {"models": {"echo": {"engine": "scripted"}}, "grace_seconds": 1}
        with serving(tmp_path, config, "--workers", "2") as running:
            # `serving` returns when one front end answers. This line is logged when both listen.
            assert eventually(lambda: "serving echo on" in running.log.read_text())
            yield running

    def test_ends_with_a_parent_that_was_killed(self, pair: Running) -> None:
        fronts = pair.fronts()
        os.kill(fronts[0], signal.SIGSTOP)
        pair.process.kill()
        pair.process.wait()
        assert eventually(lambda: all(map(gone, fronts)))

    def test_is_replaced(self, pair: Running) -> None:
        stuck, healthy = pair.fronts()
        os.kill(stuck, signal.SIGSTOP)
        assert eventually(lambda: gone(stuck) and len(pair.fronts()) == 2)
        assert healthy in pair.fronts()

    def test_does_not_prevent_shutdown(self, pair: Running) -> None:
        os.kill(pair.fronts()[0], signal.SIGSTOP)
        assert pair.stop(PATIENCE) == 0

    def test_healthy_front_ends_are_kept_after_the_parent_was_suspended(self, pair: Running) -> None:
        fronts = pair.fronts()
        os.kill(pair.process.pid, signal.SIGSTOP)
        time.sleep(15)
        os.kill(pair.process.pid, signal.SIGCONT)
        with talking(pair) as client:
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline:
                assert text_of(ask(client, COMPLETIONS)) == "hello"
                time.sleep(0.1)
        assert pair.fronts() == fronts
