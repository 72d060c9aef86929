from xml.etree import ElementTree

import pytest

from dragoman.loadtest.figures import Level, Sample, SampleUsage, summarize
from dragoman.loadtest.plot import draw_svg, ticks

SVG = "{http://www.w3.org/2000/svg}"


def level(concurrency: int, first: float = 0.1) -> Level:
    return summarize(concurrency, [Sample(first + 1, (first, first + 1), SampleUsage(10, 20), 200)], 2.0, [])


def circles(picture: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(picture).iter(f"{SVG}circle"))


@pytest.mark.parametrize("levels", [[1], [1, 4, 16], [8, 2, 3, 5, 300]])
def test_three_points_per_level_inside_the_panels(levels: list[int]) -> None:
    found = circles(draw_svg("m", "load", [level(concurrency, concurrency / 10) for concurrency in levels]))
    assert len(found) == 3 * len(levels)
    for circle in found:
        assert 64 <= float(circle.attrib["cx"]) <= 856
        assert 112 <= float(circle.attrib["cy"]) <= 338


def test_missing_values_are_not_drawn() -> None:
    failed = summarize(4, [Sample(0.1, error="gone")], 1.0, [])
    assert len(circles(draw_svg("m", "load", [level(1), failed]))) == 4


def test_title_is_escaped_and_truncated() -> None:
    root = ElementTree.fromstring(draw_svg('<script>&"' + "x" * 200, "a < b", [level(1)]))
    title = root.find(f"{SVG}text[@class='title']")
    assert title is not None
    assert title.text is not None
    assert title.text.startswith('<script>&"xxx')
    assert len(title.text) == 80


@pytest.mark.parametrize("highest", [0.003, 0.99, 1, 7, 34.8, 100, 2041, 1e6])
def test_ticks_are_few_and_reach_the_top(highest: float) -> None:
    found = ticks(highest)
    assert found[0] == 0
    assert highest <= found[-1] * 1.0001 <= highest * 1.7
    assert 3 <= len(found) <= 7
