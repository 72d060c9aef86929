"""Messages arrive whole and in order, however the connection splits them."""

import asyncio
import io

from hypothesis import given
from hypothesis import strategies as st

from dragoman.ipc.framing import HEADER, MessageConnection, read_body


@given(st.lists(st.binary(max_size=40), max_size=12), st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_messages_survive_any_chunking(bodies: list[bytes], sizes: list[int]) -> None:
    data = b"".join(HEADER.pack(len(body)) + body for body in bodies)

    async def scenario() -> None:
        received: list[bytes] = []
        link = MessageConnection(lambda body: received.append(bytes(body)), lambda: None)
        at = 0
        while at < len(data):
            for size in sizes:
                if data[at : at + size]:
                    link.data_received(data[at : at + size])
                at += size
        assert received == bodies

    asyncio.run(scenario())
    source = io.BytesIO(data + b"\x05\x00\x00\x00cut")
    assert [read_body(source) for _ in range(len(bodies) + 1)] == [*bodies, None]


def test_closed_link_delivers_nothing() -> None:
    async def scenario() -> None:
        received: list[bytes] = []

        def receive(body: memoryview) -> None:
            received.append(bytes(body))
            link.close()

        link = MessageConnection(receive, lambda: None)
        link.data_received(b"\x01\x00\x00\x00a\x01\x00\x00\x00b")
        link.data_received(b"\x01\x00\x00\x00c")
        assert received == [b"a"]

    asyncio.run(scenario())
