"""Pinned texts: who gives way, and when their time is over."""

from hypothesis import given
from hypothesis import strategies as st

from dragoman.engines.llama.pinned_prefixes import Pins
from tests.engines.world import World


def text(which: int, length: int = 100) -> tuple[int, ...]:
    return tuple(range(1000 * which, 1000 * which + length))


def ask(world: World, prompt: tuple[int, ...], keep: float = 0, principal: str = "") -> int:
    """The tokens of a prompt that did not have to be decoded."""
    world.add(prompt, 1, principal=principal, keep=keep)
    job = len(world.jobs) - 1
    shared = 0
    while not world.scheduler.idle:
        world.step(200)
        if job in world.scheduler.slots:
            shared = world.scheduler.shared(job)
    return shared


def test_a_pinned_text_outlives_all_others_until_its_time_is_over() -> None:
    world = World(1, 2)
    ask(world, text(0), keep=300)
    for which in range(1, 20):
        ask(world, text(which))
    assert ask(world, text(0)) == 98
    world.now = 301
    for which in range(20, 24):
        ask(world, text(which))
    assert ask(world, text(0)) == 0


def test_without_a_pin_it_would_not() -> None:
    world = World(1, 2)
    for which in range(4):
        ask(world, text(which))
    assert ask(world, text(0)) == 0


def test_half_of_the_shelf_may_be_pinned_and_the_oldest_gives_way() -> None:
    world = World(1, 4)
    for which in range(3):
        ask(world, text(which), keep=300)
    for which in range(10, 30):
        ask(world, text(which))
    assert [ask(world, text(which)) for which in (1, 2, 0)] == [98, 98, 0]


def test_one_place_is_too_few_for_a_pin() -> None:
    world = World(1, 1)
    world.add(text(0), 1, keep=300)
    world.step(200)
    assert world.scheduler.kept(0) == 0
    world.finish()
    assert not world.scheduler.sequences.pins.live


def test_what_is_kept_is_told_once() -> None:
    world = World(1, 2)
    told: list[tuple[int, int]] = []
    for prompt in (text(0), text(0), (*text(0), *text(5))):
        world.add(prompt, 2, keep=300)
        world.step(500)
        told.append((world.scheduler.shared(len(told)), world.scheduler.kept(len(told))))
        world.finish()
    assert told == [(0, 100), (98, 2), (100, 100)]


def test_what_is_too_short_to_be_taken_is_not_kept() -> None:
    world = World(1, 2)
    world.add(text(0, 20), 1, keep=300)
    world.step(200)
    assert world.scheduler.kept(0) == 0
    world.finish()
    assert not world.scheduler.sequences.pins.live


def test_nobody_pins_with_a_prompt_that_was_not_taken_in() -> None:
    world = World(1, 2)
    world.add(text(0), 1, keep=300)
    world.step(50)
    world.end(0)
    world.add(text(1), 1, keep=300)
    world.step(200, frozenset([1]))
    assert not world.scheduler.sequences.pins.live


def test_a_conversation_that_goes_on_has_one_pin() -> None:
    now = 0.0
    pins = Pins(2, lambda: now)
    pins.add((1, 2), "", 3600)
    pins.add((7,), "", 300)
    now = 10
    pins.add((1, 2, 3), "", 300)
    assert [(pin.tokens, pin.until) for pin in pins.live] == [((7,), 300), ((1, 2, 3), 3600)]
    pins.add((1, 2, 3), "other", 5)
    assert [pin.salt for pin in pins.live] == ["", "other"]
    now = 15
    assert [pin.salt for pin in pins.live] == [""]


@given(
    limit=st.integers(0, 4),
    happenings=st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=4), st.sampled_from("ab"), st.integers(1, 9), st.integers(0, 3)),
        max_size=30,
    ),
)
def test_pins_are_few_live_and_none_within_another_that_came_later(
    limit: int, happenings: list[tuple[list[int], str, int, int]]
) -> None:
    now = 0

    pins = Pins(limit, lambda: now)
    for tokens, salt, seconds, passes in happenings:
        pins.add(tokens, salt, seconds)
        live = list(pins.live)
        assert len(live) <= limit
        if limit:
            assert live[-1].tokens == tuple(tokens)
            assert live[-1].until >= now + seconds
        for earlier, pin in enumerate(live):
            for later in live[earlier + 1 :]:
                assert pin.salt != later.salt or later.tokens[: len(pin.tokens)] != pin.tokens
        now += passes
        assert all(pin.until > now for pin in pins.live)
