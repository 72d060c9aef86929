"""Finds the fastest layout and number of threads of a model file on this machine, for `dragoman tune`.

    candidates := (the file as it is | its Q8_0 copy) x (physical cores | all CPUs | half of them | at most 16)
    divergence := mean of KL(original || candidate) over a text, in nats
    Q8_0       := (scale:f16 weight:i8[32])*          8.5 bits per weight

    python -m dragoman.engines.llama.tuning ORIGINAL FILE THREADS      measures one candidate; prints a `Measurement`

Rules
1. The first candidate is the default: the file as it is, with a thread for each physical core.
2. A copy is tried if enough of the model has types without fast kernels and both files fit into the memory. The
   original is never changed.
3. A candidate replaces the best one before it if it is faster by `MIN_SPEEDUP` in the geometric mean and in no figure
   slower than `MIN_RELATIVE_SPEED`. A copy must be faster by `MIN_COPY_SPEEDUP` and predict nearly the same tokens.
4. Each candidate is measured in a process of its own, with a time limit, because llama.cpp may crash and the memory of
   one candidate is measured. A candidate that fails is not chosen.
5. The best of several rounds counts, because other load only makes a round slower.
"""

import math
import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
from gguf.constants import GGMLQuantizationType, LlamaFileType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from dragoman.core.errors import ConfigError, DragomanError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.binding import Context, ContextParams, LlamaModel
from dragoman.engines.llama.tuning_record import Measurement, Trial, TuningKey, TuningRecord, copy_path, record_path
from dragoman.files.download import hash_file
from dragoman.files.gguf import TENSOR_KINDS, Outline, Tensor, read_outline
from dragoman.files.scratch import scratch

Bytes = NDArray[np.uint8]

SLOW_TYPES = {number for number, (name, _, _) in TENSOR_KINDS.items() if name in ("Q4_1", "Q5_0", "Q5_1")}
"""Types without fast matrix kernels. The K types have fast kernels and measured slower as Q8_0."""
MIN_SLOW_SHARE = 0.25
MAX_BOTH = 2.7
"""Size of both files together, relative to the original: Q4_1 has 5 bits per weight and Q8_0 has 8.5."""
MAX_USUAL_THREADS = 16
"""With more, decoding is often bound by memory."""
MIN_SPEEDUP, MIN_COPY_SPEEDUP, MIN_RELATIVE_SPEED = 1.05, 1.15, 0.9
MAX_DIVERGENCE = 0.02
TRIAL_SECONDS = 600.0

WEIGHTS_AT_ONCE = 1 << 22
"""Weights that are converted at once: 16 MB as floats."""
Q8_0 = GGMLQuantizationType.Q8_0

PROMPT_ROWS = 64
STREAMS = 8
STEPS = 4
MIN_ROUNDS, MAX_ROUNDS = 2, 6
MAX_SECONDS = 3.0
"""No round begins after this time."""
MAX_TOKENS = 512
BATCH_TOKENS = 32
"""Tokens per decode of the text. Bounds the memory for logits."""

TEXT = """\
The ferry left at ten past six, while the harbour was still grey. On deck a woman with a green suitcase asked
the mate how long the crossing would take. "Four hours if the wind stays where it is," he said, "and five if
it turns. You will want a coat." She had none, so he lent her his, which smelled of rope and tobacco, and they
stood by the rail until the lighthouse was a small white tooth behind them.

A mixture of two gases at the same temperature has a pressure that is the sum of the pressures which each of
them would have alone. John Dalton found this in 1801. It follows from the fact that the molecules of an ideal
gas do not notice each other: every kind of molecule hits the walls as often as if the others were not there.
At 20 degrees Celsius, air with a relative humidity of 50 % contains about 8.6 grams of water per cubic metre;
the same air at 30 degrees could hold 30.4 grams.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2 == 1:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: A baker sells 36 rolls in the first hour and half as many in each hour after that. How many rolls
has she sold after three hours? Answer: In the first hour she sells 36, in the second 18 and in the third 9.
Together these are 36 + 18 + 9 = 63 rolls.

To make the soup, cut two onions and three carrots into small pieces and fry them in butter until they are
soft. Add a litre of stock, a bay leaf and 200 grams of red lentils. Let everything simmer for twenty minutes,
then take out the bay leaf and season with salt, pepper and a little lemon juice. Serve it with bread.

{"name": "Ada", "born": 1815, "languages": ["English", "French"], "married": true, "children": 3}
"""


def tune(original: Path, progress: Callable[[str, float], object] = lambda _doing, _done: None) -> TuningRecord:
    """Try all candidates and store the record. `progress` gets the current step and the completed fraction."""
    outline = read_outline(original)
    if outline.metadata.get(f"{outline.metadata.get('general.architecture')}.attention.causal") is False:
        raise ConfigError(f"{original} creates embeddings; only models that generate text can be tuned")
    path = record_path(original)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch(path.parent, ".tuning-") as folder:
            copy = folder / "Q8_0.gguf"
            if _has_slow_types(outline) and MAX_BOTH * original.stat().st_size < hardware.memory():
                requantize(original, copy, lambda done: progress("converting to Q8_0", done / 4))
            record = _try_candidates(original, copy, progress)
            if record.chosen.layout == "as-is":
                copy_path(original).unlink(missing_ok=True)
            else:
                copy.replace(copy_path(original))
            written = folder / path.name
            written.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=2))
            written.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write to {path.parent}: {error.strerror or error}") from error
    return record


def _try_candidates(original: Path, copy: Path, progress: Callable[[str, float], object]) -> TuningRecord:
    key = TuningKey.of(original)
    candidates = [Trial("as-is", threads) for threads in thread_counts()]
    begin = 0.0
    if copy.exists():
        candidates += [Trial("Q8_0", threads) for threads in thread_counts()]
        begin = 0.25
    trials: list[Trial] = []
    for candidate in candidates:
        done = begin + (1 - begin) * len(trials) / len(candidates)
        progress(f"measuring {candidate.layout}, {candidate.threads} threads", done)
        trials.append(_run(candidate, original, original if candidate.layout == "as-is" else copy))
        if trials[0].error:
            raise ConfigError(f"{original} cannot be measured: {trials[0].error}")
    chosen = choose(trials)
    if chosen.layout == "as-is":
        return TuningRecord(key, chosen, tuple(trials))
    return TuningRecord(key, chosen, tuple(trials), copy.stat().st_size, hash_file(copy))


def thread_counts() -> list[int]:
    """Return the numbers of threads to try, the default first."""
    cpus = hardware.cpus()
    return list(dict.fromkeys([hardware.threads(), cpus, -(-cpus // 2), min(cpus, MAX_USUAL_THREADS)]))


def choose(trials: Sequence[Trial]) -> Trial:
    best, *others = trials
    for trial in others:
        if _is_better(trial, best):
            best = trial
    return best


def _is_better(trial: Trial, best: Trial) -> bool:
    new, old = trial.measured, best.measured
    if new is None or old is None:
        return False
    ratios = (new.prompt / old.prompt, new.one / old.one, new.eight / old.eight)
    required = MIN_SPEEDUP if trial.layout == best.layout else MIN_COPY_SPEEDUP
    is_faster = math.prod(ratios) ** (1 / 3) >= required and min(ratios) >= MIN_RELATIVE_SPEED
    return is_faster and new.divergence <= MAX_DIVERGENCE


def _run(candidate: Trial, original: Path, file: Path) -> Trial:
    """Return the candidate with its measurement, or with the reason why it has no measurement."""
    command = [sys.executable, "-m", "dragoman.engines.llama.tuning", str(original), str(file), str(candidate.threads)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=TRIAL_SECONDS, check=False)  # noqa: S603
    except subprocess.TimeoutExpired:
        return msgspec.structs.replace(candidate, error=f"it took more than {TRIAL_SECONDS:.0f} seconds")
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().splitlines() if done.returncode > 0 else []
        return msgspec.structs.replace(candidate, error=[f"the process ended with code {done.returncode}", *lines][-1])
    measured = msgspec.json.decode(done.stdout.splitlines()[-1], type=Measurement)
    return msgspec.structs.replace(candidate, measured=measured)


def _has_slow_types(outline: Outline) -> bool:
    """Whether enough weights have slow types. Split files, and files with unknown types, are not converted."""
    if "split.count" in outline.metadata or any(tensor.kind not in TENSOR_KINDS for tensor in outline.tensors):
        return False
    slow = sum(tensor.elements for tensor in outline.tensors if tensor.kind in SLOW_TYPES)
    return slow > 0 and slow >= MIN_SLOW_SHARE * sum(tensor.elements for tensor in outline.tensors)


def requantize(source: Path, target: Path, progress: Callable[[float], object]) -> None:
    """Copy the file with tensors of slow types as Q8_0. `progress` is called with the completed fraction.

    Metadata is copied byte for byte, except for `general.file_type`. The output is deterministic.
    """
    outline = read_outline(source)
    data: Bytes = np.memmap(source, dtype=np.uint8, mode="r")
    weights, done = sum(tensor.elements for tensor in outline.tensors), 0
    with target.open("xb") as file:
        file.write(_head(data, outline))
        for tensor in outline.tensors:
            file.write(bytes(-file.tell() % outline.alignment))
            start = outline.data_start + tensor.offset
            for part in _convert(tensor, data[start : start + tensor.bytes]):
                file.write(part.data)
            done += tensor.elements
            progress(done / weights)
        file.write(bytes(-file.tell() % outline.alignment))
        file.flush()
        os.fsync(file.fileno())


def _head(data: Bytes, outline: Outline) -> bytes:
    """Return the bytes before the tensor data."""
    head = bytearray(data[: outline.pairs_end].tobytes())
    if position := outline.places.get("general.file_type"):
        struct.pack_into("<I", head, position, LlamaFileType.MOSTLY_Q8_0)
    offset = 0
    for tensor in outline.tensors:
        new = msgspec.structs.replace(tensor, kind=int(Q8_0)) if tensor.kind in SLOW_TYPES else tensor
        name, sizes = new.name.encode(), new.sizes
        head += struct.pack("<Q", len(name)) + name
        head += struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, new.kind, offset)
        offset += -(-new.bytes // outline.alignment) * outline.alignment
    return bytes(head)


def _convert(tensor: Tensor, data: Bytes) -> Iterator[Bytes]:
    """Yield a tensor's new bytes, some rows at a time."""
    if tensor.kind not in SLOW_TYPES:
        yield data
        return
    rows = data.reshape(tensor.elements // tensor.sizes[0], -1)
    step = max(WEIGHTS_AT_ONCE // tensor.sizes[0], 1)
    for start in range(0, len(rows), step):
        yield quantize(dequantize(rows[start : start + step], GGMLQuantizationType(tensor.kind)), Q8_0).reshape(-1)


def measure(original: Path, file: Path, threads: int) -> Measurement:
    model = LlamaModel(file)
    prompt, one, eight = _measure_speed(model, threads)
    kilobyte = 1 if sys.platform == "darwin" else 1024
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobyte
    divergence = 0.0 if file == original else _measure_divergence(LlamaModel(original), model, threads)
    return Measurement(prompt, one, eight, memory, divergence)


def _measure_speed(model: LlamaModel, threads: int) -> list[float]:
    """Return the tokens per second of a prompt, of one stream and of eight streams."""
    rows, length = PROMPT_ROWS + STREAMS, PROMPT_ROWS + STEPS
    params = ContextParams(sequences=STREAMS, length=length, rows=rows, outputs=STREAMS, threads=threads)
    context = Context(model, params)
    # The first round loads the weights into memory.
    _run_round(context)
    rounds: list[tuple[float, float, float]] = []
    end = time.monotonic() + MAX_SECONDS
    while len(rounds) < MIN_ROUNDS or (len(rounds) < MAX_ROUNDS and time.monotonic() < end):
        rounds.append(_run_round(context))
    return [max(speeds) for speeds in zip(*rounds, strict=True)]


def _run_round(context: Context) -> tuple[float, float, float]:
    context.clear_all()
    prompt = _time_decode(context, range(PROMPT_ROWS), [0])
    one = sum(_time_decode(context, [PROMPT_ROWS + step], [0]) for step in range(STEPS))
    context.clear(0)
    eight = sum(_time_decode(context, [step], range(STREAMS)) for step in range(STEPS))
    return PROMPT_ROWS / prompt, STEPS / one, STREAMS * STEPS / eight


def _time_decode(context: Context, positions: Sequence[int], sequences: Sequence[int]) -> float:
    """Return the seconds for one decode with a token at each of the positions in each of the sequences."""
    rows = [(position, sequence) for sequence in sequences for position in positions]
    outputs = [position == positions[-1] for position, _ in rows]
    begin = time.perf_counter()
    context.decode_or_fail(
        [0] * len(rows), [position for position, _ in rows], [sequence for _, sequence in rows], outputs
    )
    # Some backends compute asynchronously. Reading the logits waits for them.
    context.logits(len(rows) - 1)
    return time.perf_counter() - begin


def _measure_divergence(original: LlamaModel, other: LlamaModel, threads: int) -> float:
    tokens = original.tokenize_text(TEXT)[:MAX_TOKENS]
    rows = BATCH_TOKENS
    params = ContextParams(sequences=1, length=MAX_TOKENS, rows=rows, outputs=rows, threads=threads)
    contexts = [Context(model, params) for model in (original, other)]
    divergence = 0.0
    for start in range(0, len(tokens), rows):
        p, q = (_decode_log_probabilities(context, tokens[start : start + rows], start) for context in contexts)
        divergence += float((np.exp(p) * (p - q)).sum())
    return divergence / len(tokens)


def _decode_log_probabilities(context: Context, tokens: Sequence[int], start: int) -> NDArray[np.float64]:
    rows = len(tokens)
    context.decode_or_fail(tokens, range(start, start + rows), [0] * rows, [True] * rows)
    logits = np.stack([context.logits(row) for row in range(rows)]).astype(np.float64)
    shifted = logits - logits.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return found


if __name__ == "__main__":
    try:
        result = measure(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    except DragomanError as error:
        sys.exit(str(error))
    sys.stdout.write(msgspec.json.encode(result).decode())
