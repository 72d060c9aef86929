"""Messages arrive whole and in order, however the socket splits them."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from dragoman.ipc.link import Link
from dragoman.ipc.worker_messages import HEADER


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_messages_survive_any_chunking(bodies: list[bytes], sizes: list[int]) -> None:
    async def scenario() -> None:
        received: list[bytes] = []
        link = Link(lambda body: received.append(bytes(body)), lambda: None)
        data = b"".join(HEADER.pack(len(body)) + body for body in bodies)
        at = 0
        while at < len(data):
            for size in sizes:
                if data[at : at + size]:
                    link.data_received(data[at : at + size])
                at += size
        assert received == bodies

    asyncio.run(scenario())
