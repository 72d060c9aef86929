from xml.etree import ElementTree

import pytest

from dragoman.loadtest.figures import Level, Sample, Usage, summary
from dragoman.loadtest.plot import svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


def level(concurrency: int, first: float = 0.1) -> Level:
    return summary(concurrency, [Sample(first + 1, (first, first + 1), Usage(10, 20), 200)], 2.0, [])


def circles(picture: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}circle"))


@pytest.mark.parametrize("levels", [[1], [1, 4, 16], [8, 2, 3, 5, 300]])
def test_three_points_per_level_all_inside(levels: list[int]) -> None:
    found = circles(svg("m", "load", [level(concurrency, concurrency / 10) for concurrency in levels]))
    assert len(found) == 3 * len(levels)
    for circle in found:
        assert 64 <= float(circle.attrib["cx"]) <= 856
        assert 112 <= float(circle.attrib["cy"]) <= 338


def test_what_was_not_seen_is_not_drawn() -> None:
    failed = summary(4, [Sample(0.1, error="gone")], 1.0, [])
    assert len(circles(svg("m", "load", [level(1), failed]))) == 4


def test_names_cannot_break_the_picture() -> None:
    root = ElementTree.fromstring(svg('<script>&"' + "x" * 200, "a < b", [level(1)]))
    title = root.find(f"{SVG}text[@class='title']")
    assert title is not None
    assert title.text is not None
    assert title.text.startswith('<script>&"xxx')
    assert len(title.text) == 80


@pytest.mark.parametrize("most", [0.003, 0.99, 1, 7, 34.8, 100, 2041, 1e6])
def test_ticks_are_few_and_reach_the_top(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0
    assert most <= found[-1] * 1.0001 <= most * 1.7
    assert 3 <= len(found) <= 7
