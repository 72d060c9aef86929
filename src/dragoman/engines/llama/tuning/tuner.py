"""Finds the fastest layout and number of threads of a model file on this machine, and records the choice.

    candidates := (the file as it is | its Q8_0 copy) x (physical cores | all CPUs | half of them | at most 16)

Rules
1. The first candidate is the default: the file as it is, with a thread for each physical core.
2. A copy is tried if enough of the model has types without fast kernels and both files fit into the memory. The
   original is never changed.
3. A candidate replaces the best one before it if it is faster by `MIN_SPEEDUP` in the geometric mean and in no figure
   slower than `MIN_RELATIVE_SPEED`. A copy must be faster by `MIN_COPY_SPEEDUP` and predict nearly the same tokens.
4. Each candidate is measured in a process of its own, with a time limit. A candidate that fails is not chosen.
"""

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dragoman.core.errors import ConfigError
from dragoman.engines.llama import hardware
from dragoman.engines.llama.tuning.record import Measurement, Trial, TuningKey, TuningRecord, copy_path, record_path
from dragoman.engines.llama.tuning.requantize import requantize
from dragoman.files.download import hash_file
from dragoman.files.gguf import TENSOR_KINDS, Outline, read_outline
from dragoman.files.scratch import scratch

ReportProgress = Callable[[str, float], object]

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


def tune(original: Path, progress: ReportProgress = lambda _doing, _done: None) -> TuningRecord:
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
                requantize(original, copy, SLOW_TYPES, lambda done: progress("converting to Q8_0", done / 4))
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


def _try_candidates(original: Path, copy: Path, progress: ReportProgress) -> TuningRecord:
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
    """Return the candidate with its measurement, or with the reason why there is none."""
    module = "dragoman.engines.llama.tuning.trial"
    command = [sys.executable, "-m", module, str(original), str(file), str(candidate.threads)]
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
