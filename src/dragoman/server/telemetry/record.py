"""The record of one request."""

import msgspec

from dragoman.core.events import Usage

CLIENT_DISCONNECTED = 499
"""The status of a request whose client disconnected before the end."""


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """Filled while the request runs, written when it has ended.

    `scope` is the kind of route. `route` is the path as sent; it is never used as a label.
    """

    id: str
    route: str
    scope: str | None = None
    principal: str = "anonymous"
    client: str | None = None
    scheme: str | None = None
    """The scheme of the client's connection, if a trusted proxy reports it."""
    model: str | None = None
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    unfinished_tokens: int = 0
    """Tokens of choices that were cut off, or whose server reports no usage. No client gets this number."""
    queue_us: int | None = None
    first_event_us: int | None = None
    first_token_us: int | None = None
    duration_us: int = 0
    finish: str | None = None
    error: str | None = None
    warnings: int = 0
    trace: str | None = None
    """The client's `traceparent`, if tracing is on."""

    def count(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.completion_tokens += usage.completion
        self.cached_tokens += usage.cached
        self.reasoning_tokens += usage.reasoning

    @property
    def spent_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens + self.unfinished_tokens

    def line(self) -> str:
        """The record as a line of the log."""
        tokens = f"{self.prompt_tokens}+{self.completion_tokens} tokens"
        parts = (self.id, self.principal, self.route, self.model or "-", str(self.status), tokens)
        end = self.error or self.finish or "-"
        return f"{' '.join(parts)} {self.duration_us / 1000:.1f} ms {end}"
