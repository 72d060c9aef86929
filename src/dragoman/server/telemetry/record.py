"""One request, as far as it is written down."""

import msgspec

from dragoman.core.events import Usage

CLIENT_LEFT = 499
"""The status of a request whose client left before the end."""


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """Written when the request has ended.

    `scope` is what kind of route it was; `route` is the path as it came, and never becomes the name of anything.
    """

    id: str
    route: str
    scope: str | None = None
    principal: str = "anonymous"
    client: str | None = None
    scheme: str | None = None
    """Of the client's own connection, where a proxy that is trusted says it."""
    model: str | None = None
    status: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    unfinished_tokens: int = 0
    """Of choices that broke off, or whose server tells no usage: nobody was told one that has them."""
    queue_us: int | None = None
    first_event_us: int | None = None
    first_token_us: int | None = None
    duration_us: int = 0
    finish: str | None = None
    error: str | None = None
    warnings: int = 0
    trace: str | None = None
    """The caller's `traceparent`, where traces are made."""

    def count(self, usage: Usage) -> None:
        self.prompt_tokens += usage.prompt
        self.completion_tokens += usage.completion
        self.cached_tokens += usage.cached
        self.reasoning_tokens += usage.reasoning

    @property
    def spent_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens + self.unfinished_tokens

    def line(self) -> str:
        """For people."""
        tokens = f"{self.prompt_tokens}+{self.completion_tokens} tokens"
        parts = (self.id, self.principal, self.route, self.model or "-", str(self.status), tokens)
        end = self.error or self.finish or "-"
        return f"{' '.join(parts)} {self.duration_us / 1000:.1f} ms {end}"
