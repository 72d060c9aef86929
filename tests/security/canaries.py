"""A socket that counts connections and a directory that reports opened files, for tests that expect neither."""

import ctypes
import os
import socket
import struct
from pathlib import Path

IN_ACCESS, IN_OPEN, IN_NONBLOCK = 0x1, 0x20, 0o4000


class CanarySocket:
    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]

    def connections(self) -> int:
        """The number of connections since the last call. The kernel queues them, so none is missed."""
        count = 0
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return count
            connection.close()
            count += 1

    def close(self) -> None:
        self._listener.close()


class CanaryFolder:
    """Records every file in the folder that a process opens or reads (inotify, Linux only)."""

    def __init__(self, folder: Path) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._events = self._libc.inotify_init1(IN_NONBLOCK)
        watch = self._libc.inotify_add_watch(self._events, os.fsencode(folder), IN_ACCESS | IN_OPEN)
        if self._events < 0 or watch < 0:
            raise OSError(ctypes.get_errno(), "inotify is not available")

    def accesses(self) -> list[str]:
        """The names of the files that were opened or read since the last call."""
        try:
            data = os.read(self._events, 65536)
        except BlockingIOError:
            return []
        names = []
        while data:
            _, _, _, length = struct.unpack_from("iIII", data)
            names.append(os.fsdecode(data[16 : 16 + length].rstrip(b"\0")))
            data = data[16 + length :]
        return names

    def close(self) -> None:
        os.close(self._events)
