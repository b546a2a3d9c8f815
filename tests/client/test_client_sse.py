"""EventParser on bytes that are cut anywhere."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from maskdial_client.sse import EventParser

_WIRE = (
    ': keep-alive\r\n\r\ndata: {"a": "caf\u00e9"}\r\n\r\nid: 4\nevent: x\ndata:one\ndata: two\n\n'
    "\n\ndata:  spaced\n\ndata\n\ndata: never ended\n"
).encode()
_EVENTS = ['{"a": "caf\u00e9"}', "one\ntwo", " spaced", ""]


@given(st.lists(st.integers(0, len(_WIRE)), max_size=12))
def test_events_do_not_depend_on_where_chunks_are_cut(cuts: list[int]) -> None:
    parser = EventParser()
    edges = [0, *sorted(cuts), len(_WIRE)]
    chunks = [_WIRE[start:end] for start, end in pairwise(edges)]
    assert [event for chunk in chunks for event in parser.feed(chunk)] == _EVENTS
