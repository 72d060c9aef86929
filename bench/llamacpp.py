"""llama.cpp's own HTTP server, as a peer.

Run by bench/engine.py as `python -m bench.llamacpp PORT MODEL SLOTS CONTEXT THREADS [BATCH]`.
"""

import sys
import threading

import xllamacpp


def params(port: int, model: str, slots: int, context: int, threads: int, batch: int | None) -> xllamacpp.CommonParams:
    """All other values are llama.cpp's defaults."""
    chosen = xllamacpp.CommonParams()
    chosen.model.path = model
    chosen.port = port
    chosen.n_parallel = slots
    chosen.n_ctx = slots * context
    chosen.cpuparams.n_threads = chosen.cpuparams_batch.n_threads = threads
    if batch is not None:
        chosen.n_batch = batch
    return chosen


if __name__ == "__main__":
    port, model, slots, context, threads, *batch = sys.argv[1:]
    size = int(batch[0]) if batch else None
    server = xllamacpp.Server(params(int(port), model, int(slots), int(context), int(threads), size))
    threading.Event().wait()
