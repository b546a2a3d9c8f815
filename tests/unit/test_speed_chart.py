"""The README's chart: drawn from the table of speeds, and up to date."""

import pytest

from tools import speed_chart

TABLE = f"""
{speed_chart._HEAD}
|---|---|---|---|---|---|---|
| **maskdial int8** | 8.5 | 0.0048 | 1,000 ms | 10.0 ms | 20 ms | 40 ms |
| other <Q8> | 8.6 | 0.0048 | 2,000 (2.00) | 40 (4.00) | 1 | 50 (1.25) |
| **maskdial int4** | 5.4 | 0.085 | 1 ms | 1 ms | 1 ms | 1 ms |
| other Q4 | 5.5 | 0.3 | 1 | 1 | 1 | 1 |
"""


def test_the_chart_is_up_to_date() -> None:
    assert speed_chart.CHART.read_text() == speed_chart.chart(), "run make format"


def test_only_rows_of_ours_in_eight_bits_and_its_peers() -> None:
    ours, other = speed_chart.rows(TABLE)
    assert (ours.name, other.name, other.bits) == ("maskdial int8", "other <Q8>", "8.6")
    assert list(other.times.values()) == [2000, 40, 50]
    drawn = speed_chart.draw([ours, other])
    for part in ("other &lt;Q8&gt;", ">0.50<", ">0.25<", ">0.80<", "8.5 to 8.6 bits"):
        assert part in drawn


def test_a_page_without_the_table() -> None:
    with pytest.raises(ValueError, match="has no table with the columns"):
        speed_chart.rows("# Performance")
    with pytest.raises(ValueError, match="'-' has no time"):
        speed_chart.rows(TABLE.replace("1,000 ms", "-"))
