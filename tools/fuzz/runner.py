"""Cases against a server: several connections at once, in batches, with checks between them."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from tools.fuzz.cases import ANY, LAST_ID, HttpCase, RawCase, Request, SocketCase
from tools.fuzz.client import Connection, Malformed, Reply, connect, read_replies
from tools.fuzz.http import LAST
from tools.fuzz.monitor import Monitor
from tools.fuzz.oracle import Judgement, judge, judge_raw
from tools.fuzz.servers import StoredKeys, store_keys
from tools.fuzz.shapes import Wrong
from tools.fuzz.state import Book, Regression, make_finding, regressions
from tools.fuzz.streams import build_types
from tools.fuzz.websocket import check_socket, read_received
from tools.server import Server, run_server
from tools.websocket import CLOSE, frame

BATCH = 1000
MOST_FINDINGS = 20
NO_ID = b"resp_none"
"""Stands for the id of the latest reply if no reply had one."""
RAW_SECONDS = 20.0
QUIET_SECONDS = 4.0
"""After so long the next request is sent where it is not known how many answers there will be."""
MOST_SILENT = 4
"""After so many cases in a row without an answer the server counts as hanging, and is started again."""
CLOSE_FRAME = frame(CLOSE, b"\x03\xe8")
NO_ANSWER_ALLOWED = frozenset({413, 431})
"""These close the connection while the client is still sending, which may cost it the answer."""
ServerCase = HttpCase | RawCase | SocketCase
Numbered = tuple[int, ServerCase]
Make = Callable[[int], ServerCase]


class Summary(msgspec.Struct):
    """What a run of one target came to."""

    target: str
    engine: str
    cases: int = 0
    seconds: float = 0.0
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    findings: int = 0
    memory: tuple[int, int] = (0, 0)
    """Bytes, at the first and at the last check."""

    @property
    def rate(self) -> float:
        return self.cases / self.seconds if self.seconds else 0.0


class Problem(msgspec.Struct, frozen=True):
    number: int
    judgement: Judgement
    answer: str = ""


class HttpRun:
    """One target against one server after another: a server that died is started again."""

    def __init__(
        self,
        target: str,
        engine: str,
        seed: str,
        book: Book,
        folder: Path,
        *,
        make: Make,
        config: Mapping[str, Any],
        connections: int,
        seconds: float,
        workers: int = 1,
        log: Callable[[str], None] = print,
    ) -> None:
        self.summary = Summary(target, engine)
        self._target, self._engine, self._seed, self._book = target, engine, seed, book
        self._folder, self._make, self._seconds, self._workers, self._log = folder, make, seconds, workers, log
        self._config = {**config, "keys": {"store": str(folder / "keys.db")}}
        self._keys: StoredKeys = store_keys(folder / "keys.db")
        self._connections = connections
        self._stack = ExitStack()
        self._ids: dict[str, int] = {}
        self._faults: set[str] = set()
        """Requests that got a status above 500 which was expected: the log may say why, in a line."""
        self._problems: list[Problem] = []
        self._in_flight: set[int] = set()
        self._silent = 0
        """Cases in a row that had no answer in time."""

    def run(self, numbers: Sequence[int]) -> Summary:
        """Regressions first; then the cases with these numbers."""
        build_types()
        begun = time.monotonic()
        with self._stack:
            self._start()
            self._replay(regressions(self._target))
            for at in range(0, len(numbers), BATCH):
                batch = numbers[at : at + BATCH]
                self._run_batch(batch, self._make)
                self._book.note_progress(self._engine, self._target, batch[-1] + 1)
                if self.summary.findings >= MOST_FINDINGS:
                    self._log(f"{self._target}: {MOST_FINDINGS} findings, the rest is left out")
                    break
            self._report([Problem(-1, judgement) for judgement in self._monitor.check_end()], {})
        self.summary.seconds = time.monotonic() - begun
        return self.summary

    def _start(self) -> None:
        self._server: Server = self._stack.enter_context(
            run_server(self._folder, self._config, "--workers", str(self._workers))
        )
        self._monitor = Monitor(self._server)

    def _replay(self, kept: Iterable[Regression]) -> None:
        for regression in kept:
            case = regression.case
            if isinstance(case, ServerCase):
                self._run_batch([-1], lambda number, case=case: case, regression.name)  # type: ignore[misc]

    def _run_batch(self, batch: Sequence[int], make: Make, name: str = "") -> None:
        by_number: dict[int, ServerCase] = {}

        def cases() -> Iterator[Numbered]:
            # Made one by one, while the server works on those before.
            for number in batch:
                by_number[number] = make(number)
                yield number, by_number[number]

        self._play(cases(), self._connections)
        found = list(self._problems)
        for judgement, request_id in self._monitor.check():
            if judgement.kind == "log" and request_id in self._faults:
                continue
            number = self._ids.get(request_id or "", batch[0] if len(batch) == 1 else -1)
            where = "" if number >= 0 or name else f" (cases {batch[0]}-{batch[-1]})"
            found.append(Problem(number, Judgement(judgement.kind, judgement.text + where)))
        if self._is_lost:
            found += self._isolated([(number, by_number[number]) for number in sorted(self._in_flight)])
        else:
            found += [Problem(-1, judgement) for judgement in self._monitor.check_ready()]
        memory = self._monitor.memory
        if memory:
            self.summary.memory = (self.summary.memory[0] or memory[0], memory[-1])
        self._report(found, by_number, name)
        if len(by_number) < len(batch):
            # The server was lost on the way.
            self._run_batch(batch[len(by_number) :], make, name)

    def _isolated(self, suspects: Sequence[Numbered]) -> list[Problem]:
        """Start the server again, and play what was in flight when it was lost, one case after the other."""
        found = []
        self._restart()
        for number, case in suspects:
            self._play(iter([(number, case)]), 1)
            found += self._problems
            if self._is_lost or self._monitor.check_ready():
                found.append(Problem(number, Judgement("lost", "the server dies of this case, or hangs")))
                self._restart()
        return found

    def _restart(self) -> None:
        self._server.process.kill()
        self._start()

    @property
    def _is_lost(self) -> bool:
        """The server has died, or answers no connection in time."""
        return not self._server.is_alive or self._silent >= MOST_SILENT

    def _report(self, problems: Sequence[Problem], cases: Mapping[int, ServerCase], name: str = "") -> None:
        for problem in problems:
            case = cases.get(problem.number, HttpCase(()))
            finding = make_finding(
                self._target, self._engine, self._seed, problem.number, case, problem.judgement, answer=problem.answer
            )
            if self._book.is_known(finding):
                continue
            finding = msgspec.structs.replace(
                finding, repeats=self._repeats(problem, case), log=self._monitor.log_tail()
            )
            file = self._book.add(finding)
            self.summary.findings += 1
            self._log(f"{self._target}: {name or problem.number}: {finding.kind}: {finding.text[:300]}")
            self._log(f"    {finding.command if problem.number >= 0 else file}")

    def _repeats(self, problem: Problem, case: ServerCase) -> bool | None:
        """Whether the case alone has a problem again."""
        if problem.number < 0 or problem.judgement.kind in ("died", "lost", "slow"):
            return None
        self._play(iter([(problem.number, case)]), 1)
        return bool(self._problems) or bool(self._monitor.check())

    def _play(self, cases: Iterator[Numbered], connections: int) -> None:
        self._problems, self._ids, self._faults, self._in_flight, self._silent = [], {}, set(), set(), 0
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._play_all(cases, connections))

    async def _play_all(self, cases: Iterator[Numbered], connections: int) -> None:
        await asyncio.gather(*(self._play_some(cases) for _ in range(connections)))

    async def _play_some(self, source: Iterator[Numbered]) -> None:
        connection: Connection | None = None
        for number, case in source:
            if self._is_lost:
                return
            self._in_flight.add(number)
            silent = self._silent
            try:
                if isinstance(case, RawCase):
                    await self._play_raw(number, case)
                elif isinstance(case, SocketCase):
                    await self._play_socket(number, case)
                else:
                    connection = await self._play_http(number, case, connection)
            except OSError as error:
                if self._server.is_alive:
                    self._note(number, Judgement("no connection", repr(error)))
            if self._server.is_alive and self._silent == silent:
                self._in_flight.discard(number)
                self._silent = 0
            self.summary.cases += 1
        if connection is not None:
            connection.abort()

    def _note(self, number: int, judgement: Judgement, reply: Reply | None = None) -> None:
        answer = "" if reply is None else f"{reply.status} {reply.headers!r} {reply.body[:2000]!r}"
        self._problems.append(Problem(number, judgement, answer))

    async def _play_http(self, number: int, case: HttpCase, connection: Connection | None) -> Connection | None:
        last_id = NO_ID
        for request in case.requests:
            if last_id is NO_ID and (LAST_ID in request.body or LAST_ID.decode() in request.path):
                # The request that should have made it was refused.
                request = msgspec.structs.replace(request, expect=request.expect | ANY)
            data = self._written(request, last_id)
            try:
                connection, reply = await self._asked(connection, request, data)
            except TimeoutError:
                self._silent += 1
                self._note(
                    number,
                    Judgement("slow", f"{request.method} {request.path[:80]} takes longer than {self._seconds:g} s"),
                )
                return None
            except Malformed as error:
                self._note(number, Judgement("malformed", f"{request.method} {request.path[:80]}: {error}"))
                return None
            if request.leave_after is not None:
                connection.abort()
                self.summary.outcomes["left"] += 1
                return None
            if reply is None:
                if not request.expect <= NO_ANSWER_ALLOWED and self._server.is_alive:
                    self._note(
                        number,
                        Judgement("no answer", f"{request.method} {request.path[:80]}: {connection.received[:200]!r}"),
                    )
                self.summary.outcomes["closed"] += 1
                return None
            self.summary.outcomes[str(reply.status)] += 1
            request_id = reply.headers.get(b"x-request-id", b"").decode()
            self._ids[request_id] = number
            if problem := judge(request, reply):
                self._note(number, problem, reply)
            elif reply.status >= 500:
                self._faults.add(request_id)
            last_id = _id_of(reply) or last_id
            if reply.closes:
                connection.abort()
                connection = None
        return connection

    async def _asked(
        self, connection: Connection | None, request: Request, data: bytes
    ) -> tuple[Connection, Reply | None]:
        """A connection that was used before may have been closed by now: then a fresh one is used."""
        if connection is None or connection.is_lost:
            connection = await connect(self._server.port)
        reply = await connection.ask(data, request.method, self._seconds, request.leave_after)
        if reply is None and request.leave_after is None and connection.is_reused and not connection.received:
            connection = await connect(self._server.port)
            reply = await connection.ask(data, request.method, self._seconds, request.leave_after)
        return connection, reply

    def _written(self, request: Request, last_id: bytes) -> bytes:
        path = request.path.encode("latin-1", "replace").replace(LAST_ID, last_id)
        body = request.body.replace(LAST_ID, last_id)
        lines = [b"%b %b HTTP/1.1" % (request.method.encode(), path)]
        if not any(name == "host" for name, _ in request.headers):
            lines.append(b"host: 127.0.0.1")
        for name, value in request.headers:
            value = value.replace("@scoped-key@", self._keys.scoped).replace("@limited-key@", self._keys.limited)
            lines.append(b"%b: %b" % (name.encode(), value.encode("latin-1", "replace")))
        if body or request.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d" % len(body))
        return b"\r\n".join(lines) + b"\r\n\r\n" + body

    async def _play_raw(self, number: int, case: RawCase) -> None:
        connection = await connect(self._server.port)
        try:
            for at, piece in enumerate(case.writes):
                if at and case.pause:
                    await asyncio.sleep(case.pause)
                connection.write(piece)
            if case.leave:
                self.summary.outcomes["left"] += 1
                return
            wanted = case.expect
            is_complete = None if wanted is None else lambda data: len(read_replies(data)[0]) >= len(wanted)
            is_over = await connection.read_until_over(QUIET_SECONDS if wanted is None else RAW_SECONDS, is_complete)
            if not is_over and wanted is None:
                # It may be idle, and wait for the next request.
                connection.write(LAST)
                is_over = await connection.read_until_over(RAW_SECONDS, None)
        finally:
            connection.abort()
        try:
            replies, rest = read_replies(connection.received)
        except Malformed as error:
            self._note(number, Judgement("malformed", str(error)))
            return
        self.summary.outcomes.update([str(reply.status) for reply in replies] or ["closed"])
        for reply in replies:
            self._ids[reply.headers.get(b"x-request-id", b"").decode()] = number
        if not is_over:
            self._silent += not replies
            self._note(
                number, Judgement("slow", f"the connection is open after {RAW_SECONDS:g} s, {len(replies)} answers")
            )
        elif problem := judge_raw(case, replies, rest):
            self._note(number, problem, replies[-1] if replies else None)

    async def _play_socket(self, number: int, case: SocketCase) -> None:
        connection = await connect(self._server.port)
        try:
            for at, piece in enumerate(case.writes):
                if at and case.pause:
                    await asyncio.sleep(case.pause)
                connection.write(piece)
            if case.leave:
                self.summary.outcomes["left"] += 1
                return
            is_over = await self._finish_socket(connection, case)
        finally:
            connection.abort()
        try:
            received = read_received(connection.received)
            if is_over:
                check_socket(case, received)
            elif case.codes is not None:
                self._silent += not (received.events or received.is_open)
                raise Wrong(f"the connection is open after {RAW_SECONDS:g} s, {received.answers} answers")
        except (Malformed, Wrong) as error:
            self._note(number, Judgement("websocket", str(error)))
            return
        self.summary.outcomes[str(received.code) if received.is_open else "refused"] += 1

    async def _finish_socket(self, connection: Connection, case: SocketCase) -> bool:
        """Wait for the answers, then send a close frame, if they are known. True: the server closes the connection."""
        if case.answers is None:
            return await connection.read_until_over(QUIET_SECONDS if case.codes is None else RAW_SECONDS, None)
        answers, pongs = case.answers, case.pongs or 0

        def is_answered(data: bytes) -> bool:
            received = read_received(data)
            return received.answers >= answers and received.pongs >= pongs

        await connection.read_until_over(RAW_SECONDS, is_answered)
        connection.write(CLOSE_FRAME)
        return await connection.read_until_over(RAW_SECONDS, None)


OBJECT_IDS = (b'{"id":"file-', b'{"id":"conv_', b'{"id":"batch_', b'{"id":"msgbatch_')


def _id_of(reply: Reply) -> bytes | None:
    """The id of a stored response, file, conversation or batch."""
    at = 1 if reply.body.startswith(OBJECT_IDS) else reply.body.find(b'"id":"resp_')
    return reply.body[at + 6 : reply.body.find(b'"', at + 6)] if at >= 0 else None
