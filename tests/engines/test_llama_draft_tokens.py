"""Draft tokens: guesses from earlier text, and how many are worth a row."""

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.speculation import (
    GRAM,
    MAX_AHEAD,
    MIN_JOB_SPEED,
    DraftLookup,
    StepCost,
    choose_draft_counts,
)

TEXTS = st.lists(st.integers(0, 2), max_size=60)
CPU, GPU = (0.0066, 0.0051), (0.02, 0.0001)


def cost_of(fixed: float, row: float) -> StepCost:
    cost = StepCost()
    cost.fixed, cost.row = fixed, row
    return cost


def read(prompt: list[int], reply: list[int]) -> DraftLookup:
    lookup = DraftLookup(prompt)
    for token in reply:
        lookup.append(token)
    return lookup


@given(prompt=TEXTS, reply=TEXTS)
def test_guess_continues_an_earlier_match(prompt: list[int], reply: list[int]) -> None:
    lookup = read(prompt, reply)
    text = prompt + reply
    assert lookup.tokens == text
    matches = [at for at in range(GRAM, len(text)) if text[at - GRAM : at] == text[-GRAM:]]
    assert bool(lookup.draft_chances(9)) == bool(matches)
    if matches:
        assert lookup.match in matches
        guessed = lookup.guess(9)
        assert guessed == tuple((text + list(guessed))[lookup.match + ahead] for ahead in range(9))


@given(prompt=TEXTS, reply=TEXTS, most=st.integers(-1, 9))
def test_probabilities_decrease_and_respect_the_limit(prompt: list[int], reply: list[int], most: int) -> None:
    draft_chances = read(prompt, reply).draft_chances(most)
    assert len(draft_chances) <= max(min(most, MAX_AHEAD), 0)
    assert draft_chances == sorted(draft_chances, reverse=True)
    assert all(0 <= chance <= 1 for chance in draft_chances)


def test_confirmed_match_is_kept_despite_a_later_one() -> None:
    first, decoy = [1, 2, 3, 4, 5, 6, 7], [9, 4, 5, 6, 8]
    lookup = read([*first, *decoy], [1, 2, 3, 4, 5, 6])
    assert lookup.guess(1) == (7,)
    assert lookup.confirmed == 3


def test_match_at_the_end_of_the_text_repeats() -> None:
    assert read([1, 2, 1, 2, 1, 2], []).guess(5) == (1, 2, 1, 2, 1)


def test_hit_rates_are_learnt_without_drafts() -> None:
    rng = random.Random(1)
    prompt = [rng.randrange(1000) for _ in range(300)]
    copying = read(prompt, prompt[20:60])
    assert copying.draft_chances(1)[0] > 0.9
    misled = (token for at in range(60) for token in (1, 2, 3, 100 + at))
    astray = read([], list(misled))
    assert astray.new_match_rate.value < 0.1


def test_constant_time_per_token() -> None:
    lookup = DraftLookup(())
    times = []
    for _ in range(2):
        begun = time.thread_time()
        for at in range(100_000):
            lookup.append(at * 7919 % 5000)
            lookup.guess(MAX_AHEAD) if lookup.draft_chances(MAX_AHEAD) else None
        times.append(time.thread_time() - begun)
    assert times[1] < 3 * times[0] + 0.1


@pytest.mark.parametrize(("fixed", "row"), [CPU, GPU, (0.0, 0.01), (0.1, 0.0)])
def test_cost_of_a_row_is_learnt_from_steps(fixed: float, row: float) -> None:
    rng = random.Random(2)
    cost = StepCost()
    for _ in range(400):
        rows = rng.choice([1, 1, 2, 5, 8])
        noise = 10 if rng.random() < 0.01 else rng.uniform(0.95, 1.05)
        cost.record(rows, rows - 1, (fixed + row * rows) * noise)
    for rows in (1, 8):
        assert cost.seconds(rows) == pytest.approx(fixed + row * rows, rel=0.25)


def test_wrong_row_cost_is_forgotten_without_drafts() -> None:
    cost = cost_of(0.0, 0.012)
    assert choose_draft_counts(cost, {0: CERTAIN}, 0.15) == {}
    for _ in range(100):
        cost.record(1, 0, 0.012)
    assert cost.seconds(1) == pytest.approx(0.012)
    assert choose_draft_counts(cost, {0: CERTAIN}, 0.15)[0] >= 2


def test_busy_machine_does_not_change_the_row_cost() -> None:
    rng = random.Random(3)
    cost = cost_of(*CPU)
    for _ in range(300):
        cost.record(1, 0, rng.choice([0.005, 0.012, 0.05]))
    assert 0.4 < cost.row / cost.seconds(1) < 0.6


CERTAIN = [0.98**ahead for ahead in range(1, 8)]
DOUBTFUL = [0.4**ahead for ahead in range(1, 8)]
FULL_BATCH = {0: [0.9, 0.8], **{job: [] for job in range(1, 16)}}


@pytest.mark.parametrize(
    ("machine", "chances", "counts"),
    [
        ((0, 0), {0: [0.9]}, {}),
        (CPU, {}, {}),
        (CPU, {0: CERTAIN}, {0: 7}),
        (CPU, {0: DOUBTFUL}, {}),
        (GPU, {0: DOUBTFUL}, {0: 5}),
        (CPU, FULL_BATCH, {}),
        (GPU, FULL_BATCH, {0: 2}),
        (CPU, {0: CERTAIN, 1: []}, {}),
        (CPU, {0: CERTAIN, 1: CERTAIN}, {0: 7, 1: 7}),
    ],
)
def test_only_drafts_that_are_worth_their_rows(
    machine: tuple[float, float], chances: dict[int, list[float]], counts: dict[int, int]
) -> None:
    assert choose_draft_counts(cost_of(*machine), chances, 0.15) == counts


CHANCES = st.lists(st.floats(0, 1), max_size=7).map(lambda found: sorted(found, reverse=True))


@given(
    fixed=st.floats(0, 0.1),
    row=st.floats(0, 0.05),
    texts=st.lists(CHANCES, min_size=1, max_size=6),
    gap=st.floats(0.001, 0.5),
    most=st.integers(0, 40),
)
def test_drafts_pay_in_total_and_cost_each_job_little(
    fixed: float, row: float, texts: list[list[float]], gap: float, most: int
) -> None:
    cost, draft_chances = cost_of(fixed, row), dict(enumerate(texts))
    counts = choose_draft_counts(cost, draft_chances, gap, most)
    drafted = sum(counts.values())
    assert drafted <= most
    assert all(0 < count <= len(draft_chances[job]) for job, count in counts.items())
    if not counts:
        return
    plain, seconds = cost.seconds(len(texts)), cost.seconds(len(texts) + drafted)
    tokens = {job: 1 + sum(draft_chances[job][: counts.get(job, 0)]) for job in draft_chances}
    assert sum(tokens.values()) / seconds > len(texts) / plain
    assert min(tokens.values()) / seconds >= MIN_JOB_SPEED / plain * 0.999
    assert len(texts) == 1 or seconds <= max(gap, plain / MIN_JOB_SPEED) * 1.001
