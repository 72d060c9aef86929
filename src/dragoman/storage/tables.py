"""The tables of the database, and how its schema is upgraded.

Rules
1. Times are Unix times in seconds. Costs are whole nano-units of the operator's currency.
2. Text of callers is stored as bytes (JSON): Postgres refuses NUL characters in text.
3. Every row that a caller can name belongs to a principal. Other principals cannot see it.
4. A new database is created in the present form. An older one gets the migrations after its version, in one
   transaction. A newer one is refused.
"""

from collections.abc import Callable, Sequence

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    insert,
    inspect,
    select,
    text,
    update,
)
from sqlalchemy.dialects.sqlite import REAL
from sqlalchemy.types import TypeEngine

from dragoman.core.errors import ConfigError

Migration = Callable[[Connection], None]

MIGRATIONS: Sequence[Migration] = ()
"""The changes after version 1, in order."""
MIGRATION_LOCK = 7262035181
"""The key of Postgres' lock that lets one server at a time migrate."""

# The types of SQLite's strict tables.
Time: TypeEngine[float] = Double().with_variant(REAL(), "sqlite")
Whole: TypeEngine[int] = BigInteger().with_variant(Integer(), "sqlite")

metadata = MetaData()
_version = Table("schema_version", metadata, Column("version", Whole, nullable=False), sqlite_strict=True)


def migrate(connection: Connection, migrations: Sequence[Migration] = MIGRATIONS) -> None:
    """Bring the schema to the present version. Raises a ConfigError if a newer version of Dragoman wrote it."""
    newest = 1 + len(migrations)
    if connection.dialect.name == "postgresql":
        connection.execute(text(f"SELECT pg_advisory_xact_lock({MIGRATION_LOCK})"))
    if not inspect(connection).has_table(_version.name):
        metadata.create_all(connection, checkfirst=False)
        connection.execute(insert(_version).values(version=newest))
        return
    version = connection.execute(select(_version.c.version)).scalar_one()
    if version > newest:
        raise ConfigError(
            f"a newer version of Dragoman wrote it (schema {version}, this version knows {newest}); "
            "upgrade Dragoman, or give another storage"
        )
    for change in migrations[version - 1 :]:
        change(connection)
    connection.execute(update(_version).values(version=newest))


responses = Table(
    "responses",
    metadata,
    Column("id", Text, primary_key=True),
    Column("principal", Text, nullable=False),
    Column("created", Time, nullable=False),
    Column("expires", Time, nullable=False, index=True),
    Column("status", Text, nullable=False, index=True),
    Column("is_background", Whole, nullable=False),
    Column("server", Text, nullable=False),
    Column("size", Whole, nullable=False),
    Column("request", LargeBinary),
    Column("body", LargeBinary, nullable=False),
    Index("responses_by_principal", "principal", "size"),
    sqlite_strict=True,
)
"""`server` generates the response while its status is queued or in_progress. `request` starts a background response,
and is there until the response has ended."""

response_items = Table(
    "response_items",
    metadata,
    Column("response", Text, ForeignKey(responses.c.id, ondelete="CASCADE"), primary_key=True),
    Column("position", Whole, primary_key=True),
    Column("is_output", Whole, nullable=False),
    Column("principal", Text, nullable=False),
    Column("item", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("response_items_by_item", "principal", "item"),
    sqlite_strict=True,
)
"""`item` is the id of the item, which callers can choose."""

response_events = Table(
    "response_events",
    metadata,
    Column("response", Text, ForeignKey(responses.c.id, ondelete="CASCADE"), primary_key=True),
    Column("first", Whole, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    sqlite_strict=True,
)
"""The frames of a response's stream, several in a row; `first` is the sequence number of the first one."""

conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("principal", Text, nullable=False),
    Column("created", Time, nullable=False),
    Column("used", Time, nullable=False, index=True),
    Column("size", Whole, nullable=False),
    Column("metadata", LargeBinary, nullable=False),
    Index("conversations_by_principal", "principal", "size"),
    sqlite_strict=True,
)
"""`used` is when it was changed last. `size` is that of its items."""

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation", Text, ForeignKey(conversations.c.id, ondelete="CASCADE"), primary_key=True),
    Column("position", Whole, primary_key=True),
    Column("item", LargeBinary, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("conversation_items_by_item", "conversation", "item", unique=True),
    sqlite_strict=True,
)

ledger = Table(
    "ledger",
    metadata,
    Column("id", Text, nullable=False),
    Column("server", Text, nullable=False),
    Column("opened", Time, nullable=False, index=True),
    Column("closed", Time),
    Column("key", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("status", Whole),
    Column("prompt", Whole, nullable=False),
    Column("cached", Whole, nullable=False),
    Column("completion", Whole, nullable=False),
    Column("reasoning", Whole, nullable=False),
    Column("cost", Whole, nullable=False),
    sqlite_strict=True,
)
"""One row for each request to a model; `id` is that of the request. Until it is closed, the counts are those that are
reserved. Most rows are closed when they are written, and each index costs time, so open rows have their own."""

_is_open = ledger.c.closed.is_(None)
for _column in (ledger.c.id, ledger.c.principal, ledger.c.key):
    Index(f"ledger_open_by_{_column.name}", _column, sqlite_where=_is_open, postgresql_where=_is_open)

usage = Table(
    "usage",
    metadata,
    Column("day", Whole, primary_key=True),
    Column("key", Text, primary_key=True),
    Column("principal", Text, primary_key=True),
    Column("model", Text, primary_key=True),
    Column("requests", Whole, nullable=False),
    Column("prompt", Whole, nullable=False),
    Column("cached", Whole, nullable=False),
    Column("completion", Whole, nullable=False),
    Column("reasoning", Whole, nullable=False),
    Column("cost", Whole, nullable=False),
    Index("usage_by_principal", "principal", "day"),
    Index("usage_by_key", "key", "day"),
    sqlite_strict=True,
)
"""The sums of closed rows of the ledger, by the day on which they were opened: days since 1970-01-01 in UTC."""

files = Table(
    "files",
    metadata,
    Column("id", Text, primary_key=True),
    Column("principal", Text, nullable=False),
    Column("created", Time, nullable=False),
    Column("expires", Time, nullable=False, index=True),
    Column("name", LargeBinary, nullable=False),
    Column("purpose", Text, nullable=False),
    Column("media_type", Text, nullable=False),
    Column("size", Whole, nullable=False),
    Column("digest", Text, nullable=False, index=True),
    Column("owner", Text, nullable=False),
    Index("files_by_principal", "principal", "created", "id"),
    Index("files_by_owner", "owner", "size"),
    sqlite_strict=True,
)
"""`owner` is the principal whose space the file needs. `digest` names the content in the blob store.
`name` is text in UTF-8."""

batches = Table(
    "batches",
    metadata,
    Column("id", Text, primary_key=True),
    Column("api", Text, nullable=False),
    Column("principal", Text, nullable=False),
    Column("created", Time, nullable=False),
    Column("expires", Time, nullable=False),
    Column("ended", Time, index=True),
    Column("state", Text, nullable=False, index=True),
    Column("server", Text),
    Column("total", Whole, nullable=False),
    Column("succeeded", Whole, nullable=False),
    Column("errored", Whole, nullable=False),
    Column("prompt", Whole, nullable=False),
    Column("cached", Whole, nullable=False),
    Column("completion", Whole, nullable=False),
    Column("reasoning", Whole, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Index("batches_by_principal", "principal", "api", "created", "id"),
    sqlite_strict=True,
)
"""`server` runs the batch; once it is dead, another takes the batch over. `body` has the other fields as JSON."""

batch_lines = Table(
    "batch_lines",
    metadata,
    Column("batch", Text, ForeignKey(batches.c.id, ondelete="CASCADE"), primary_key=True),
    Column("number", Whole, primary_key=True),
    Column("custom_id", LargeBinary, nullable=False),
    Column("begin", Whole, nullable=False),
    Column("length", Whole, nullable=False),
    Column("prefix", LargeBinary, nullable=False),
    Column("state", Text, nullable=False),
    Column("result", LargeBinary),
    Index("batch_lines_by_custom_id", "batch", "custom_id", unique=True),
    Index("batch_lines_by_state", "batch", "state", "prefix", "number"),
    sqlite_strict=True,
)
"""`begin` and `length` locate the line in the input. `prefix` orders lines that wait (see `protocols.batch_lines`)."""

servers = Table(
    "servers",
    metadata,
    Column("id", Text, primary_key=True),
    Column("started", Time, nullable=False),
    Column("heartbeat", Time, nullable=False),
    sqlite_strict=True,
)
"""The servers that share this database."""
