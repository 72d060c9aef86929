"""Compaction in the Responses protocol: the items, and the requests for them.

    item    := {type: compaction, id, encrypted_content}       the sealed JSON of a `SealedCompaction`
    trigger := {type: compaction_trigger}                      the last item of the input
    setting := context_management: [{type: compaction, compact_threshold?: COUNT}]

Rules
1. A trigger, and a request to `/v1/responses/compact`, are answered with one compaction item and nothing else.
2. A setting compacts the conversation above the threshold. The reply begins with the compaction item.
3. An item whose content cannot be opened is an error. If it were skipped, the model would answer without knowing the
   conversation.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from dragoman.core.edits import DEFAULT_THRESHOLD, Compact, Compaction, ContextEdited, ContextEvent
from dragoman.core.errors import DECODE_ERRORS, BadRequest, InvalidSeal
from dragoman.core.events import Usage
from dragoman.core.features import Feature
from dragoman.core.request import Asked
from dragoman.core.types import Count, CountOrZero
from dragoman.protocols import json_body
from dragoman.protocols.responses.frames import ItemEvent
from dragoman.protocols.sealed import Seal, is_own

COMPACTION = "compaction"
KINDS = (COMPACTION, "compaction_summary")
"""Codex also knows the second name."""
TRIGGER = "compaction_trigger"
SETTING = "context_management"
ID_PREFIX = "cmp_"
LocatedItem = tuple[str, str, dict[str, Any]]


class CompactionItem(msgspec.Struct, frozen=True):
    encrypted_content: str


class SealedCompaction(msgspec.Struct, frozen=True):
    """What a later request needs to know of a `Compaction`."""

    summary: str
    kept: CountOrZero
    pending: CountOrZero


class CompactionEntry(msgspec.Struct, frozen=True):
    type: Literal["compaction"]
    compact_threshold: Count | None = None


def encode_item(compaction: Compaction, item_id: str) -> dict[str, Any]:
    sealed = SealedCompaction(compaction.summary, compaction.kept, compaction.pending)
    content = Seal.COMPACTION.seal(msgspec.json.encode(sealed).decode())
    return {"type": COMPACTION, "id": item_id, "encrypted_content": content}


def open_item(path: str, item: dict[str, Any]) -> SealedCompaction:
    content, path = json_body.convert(item, CompactionItem, path).encrypted_content, f"{path}.encrypted_content"
    text = Seal.COMPACTION.open(content)
    if text is not None:
        try:
            return msgspec.json.decode(text, type=SealedCompaction)
        except DECODE_ERRORS as error:
            raise _unreadable(path, "it has no summary") from error
    raise _unreadable(path, "it was changed" if is_own(content) else "another server made it")


def _unreadable(path: str, why: str) -> InvalidSeal:
    hint = "send the conversation without this item, with the items that it replaced"
    return InvalidSeal(f"{path}: the compaction cannot be read, because {why}; {hint}", param=path)


class CompactionOutput:
    """The compaction item of a response, the first of its output. `item` is set when it is complete."""

    def __init__(self, id_suffix: str) -> None:
        self.item: dict[str, Any] | None = None
        self.usage = Usage()
        self._id = ID_PREFIX + id_suffix
        self._is_added = False

    def events(self, event: ContextEvent, opening: Iterable[ItemEvent]) -> Iterator[ItemEvent]:
        """`opening` are the events that the response begins with, if it has not begun."""
        compaction = event.compaction if isinstance(event, ContextEdited) else None
        if isinstance(event, ContextEdited) and compaction is None:
            return
        if not self._is_added:
            self._is_added = True
            yield from opening
            yield (
                "response.output_item.added",
                self._item({"type": COMPACTION, "id": self._id, "encrypted_content": ""}),
            )
        if compaction is None:
            yield "response.compaction.compacting", {"item_id": self._id, "output_index": 0}
            return
        self.usage, self.item = compaction.usage, encode_item(compaction, self._id)
        yield "response.output_item.done", self._item(self.item)

    def _item(self, item: dict[str, Any]) -> dict[str, Any]:
        return {"output_index": 0, "item": item}


def take_trigger(sent: Sequence[LocatedItem]) -> tuple[list[LocatedItem], str | None]:
    """Return the items without the trigger, and its path, if there is one."""
    triggers = [at for at, (_, kind, _) in enumerate(sent) if kind == TRIGGER]
    if not triggers:
        return list(sent), None
    path, last = sent[triggers[0]][0], len(sent) - 1
    if triggers[0] != last:
        raise BadRequest(f"{path}: a {TRIGGER} must be the last item, and the only one", param=path)
    return list(sent[:last]), path


def decode_setting(settings: Sequence[Any], asked: list[Asked]) -> tuple[Compact, ...]:
    for at, setting in enumerate(settings):
        path = f"{SETTING}[{at}]"
        decoded = json_body.convert(setting, CompactionEntry, path)
        if at:
            raise BadRequest(f"{path}: only one compaction is allowed", param=path)
        asked.append(Asked(Feature.COUNT_TOKENS, path))
        threshold = decoded.compact_threshold
    return (Compact(f"{SETTING}[0]", DEFAULT_THRESHOLD if threshold is None else threshold),) if settings else ()
