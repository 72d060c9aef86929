"""Writes the files with the results of a batch, and ends it.

Rules
1. One transaction adds the files and ends the batch. After a crash before it, the files are written again, and the
   unused blobs are swept.
2. In OpenAI's API the lines that succeeded are in the output file, all others in the error file. An empty file is left
   out. In Anthropic's API all lines are in one file, which belongs to the server.
"""

import time
from contextlib import suppress

from dragoman.core.errors import StorageUnavailable
from dragoman.protocols.batch_lines import ResultLine, encode_anthropic_result, encode_openai_result
from dragoman.storage.batch_states import StoredBatch
from dragoman.storage.batches import SERVER_PRINCIPAL, BatchStore
from dragoman.storage.blob_streams import BlobSink, write_blob
from dragoman.storage.blobs import BlobStore
from dragoman.storage.files import FileStore, NewFile, StoredFile

PAGE = 32
"""Results that are in memory at once."""
PURPOSE = "batch_output"
MEDIA_TYPE = "application/jsonl"


class ResultWriter:
    def __init__(self, store: BatchStore, files: FileStore, blobs: BlobStore) -> None:
        self._store = store
        self._files = files
        self._blobs = blobs

    async def write(self, batch: StoredBatch) -> StoredBatch | None:
        """End the batch. Returns None if this server does not run it any more."""
        counts = [0, 0]
        async with write_blob(self._blobs) as output, write_blob(self._blobs) as errors:
            sinks, after = (output, errors), 0
            while page := await self._store.read_results(batch.id, after, PAGE):
                for line in page:
                    which = int(_is_error(batch, line))
                    counts[which] += 1
                    await sinks[which].write(_encode(batch, line))
                after = page[-1].number
            files = [
                await self._draft(batch, sink, name) if count else None
                for sink, name, count in zip(sinks, ("output", "errors"), counts, strict=True)
            ]
            ended = await self._store.end(batch.id, *files)
        if ended is not None:
            # After a failure, the periodic jobs of the storage remove what is left.
            with suppress(StorageUnavailable):
                await self._store.remove_lines(batch.id)
                await self._files.delete(SERVER_PRINCIPAL, batch.source)
        return ended

    async def _draft(self, batch: StoredBatch, sink: BlobSink, name: str) -> StoredFile:
        blob = await sink.commit()
        keep_seconds = batch.output_seconds or self._store.keep_seconds
        principal = batch.principal if batch.api == "openai" else SERVER_PRINCIPAL
        file_name, expires = f"{batch.id}_{name}.jsonl", time.time() + keep_seconds
        return self._files.draft(NewFile(principal, file_name, PURPOSE, blob, expires, MEDIA_TYPE, batch.principal))


def _is_error(batch: StoredBatch, line: ResultLine) -> bool:
    return batch.api == "openai" and (line.result is None or line.result.state == "errored")


def _encode(batch: StoredBatch, line: ResultLine) -> bytes:
    if batch.api == "anthropic":
        return encode_anthropic_result(line, batch.outcome)
    return encode_openai_result(batch.id, line, batch.outcome)
