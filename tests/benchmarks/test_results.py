"""Tables and the README's sections."""

from pathlib import Path

import pytest
from results import milliseconds, replace_section, spread


def test_milliseconds_have_three_significant_digits() -> None:
    assert [milliseconds(s) for s in (0.12345, 0.012345, 0.0012345, 0.00012345, 12.3456)] == [
        *("123", "12.3", "1.23", "0.123", "12346"),
    ]


def test_a_spread_is_median_and_extremes_in_the_order_taken() -> None:
    value = spread([3.0, 1.0, 2.0, 10.0])
    assert (value.median, value.least, value.most, value.samples) == (2.5, 1.0, 10.0, (3.0, 1.0, 2.0, 10.0))


def test_only_the_named_section_of_a_page_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- a:begin -->\nold\n<!-- a:end -->\nafter\n<!-- b:begin --><!-- b:end -->\n")
    replace_section(page, "a", "new\n")
    expected = "before\n<!-- a:begin -->\nnew\n<!-- a:end -->\nafter\n<!-- b:begin --><!-- b:end -->\n"
    assert page.read_text() == expected
    replace_section(page, "a", "new")
    assert page.read_text() == expected


@pytest.mark.parametrize("text", ["nothing", "<!-- a:begin --> no end", "<!-- a:end --> no begin"])
def test_a_page_without_the_section_is_left_alone(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(ValueError, match="no section from <!-- a:begin -->"):
        replace_section(page, "a", "new")
    assert page.read_text() == text
