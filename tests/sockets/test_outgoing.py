"""The queue of what is to be written."""

from itertools import cycle

from hypothesis import given
from hypothesis import strategies as st

from tests.sockets.wire import numbered
from wcache_async.protocol.framing import Segment
from wcache_async.sockets.fds import OwnedFd
from wcache_async.sockets.outgoing import MAX_BUFFERS_PER_SEND, Outgoing


def queue(*segments: Segment[OwnedFd]) -> Outgoing:
    outgoing = Outgoing()
    outgoing.extend(segments)
    return outgoing


def test_plain_segments_share_a_send_up_to_a_limit() -> None:
    outgoing = queue(*(Segment(b"%d" % (n % 10)) for n in range(MAX_BUFFERS_PER_SEND + 1)))
    buffers, fds = outgoing.batch()
    assert len(buffers) == MAX_BUFFERS_PER_SEND
    assert fds == ()


def test_a_segment_with_fds_never_follows_another_in_the_same_send() -> None:
    fds = numbered(2)
    outgoing = queue(Segment(b"plain"), Segment(b"one", (fds[0],)), Segment(b"more"), Segment(b"two", (fds[1],)))
    assert outgoing.batch() == ([b"plain"], ())
    outgoing.advance(5)
    assert outgoing.batch() == ([b"one", b"more"], (fds[0],))
    outgoing.advance(7)
    assert outgoing.batch() == ([b"two"], (fds[1],))
    outgoing.drop()


def test_fds_go_with_the_first_byte_alone_and_are_closed_then() -> None:
    data = b"header and body"
    for split in range(1, len(data)):
        fds = numbered(2)
        outgoing = queue(Segment(data, tuple(fds)))
        outgoing.advance(split)
        assert all(fd.closed for fd in fds)
        buffers, rest = outgoing.batch()
        assert (bytes(buffers[0]), rest) == (data[split:], ())


def test_dropping_closes_every_fd() -> None:
    fds = numbered(2)
    outgoing = queue(Segment(b"one", (fds[0],)), Segment(b"two", (fds[1],)))
    outgoing.drop()
    assert all(fd.closed for fd in fds)
    assert outgoing.pending == 0


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=200),
    st.lists(st.integers(1, 1000), min_size=1, max_size=20),
)
def test_every_byte_is_written_once_and_in_order_however_sends_are_cut(sizes: list[int], cuts: list[int]) -> None:
    parts = [bytes([number % 256]) * size for number, size in enumerate(sizes)]
    outgoing = queue(*(Segment(part) for part in parts))
    written = b""
    for cut in cycle(cuts):
        if not outgoing.pending:
            break
        offered = b"".join(outgoing.batch()[0])
        taken = min(cut, len(offered))
        written += offered[:taken]
        outgoing.advance(taken)
        assert outgoing.written == len(written)
        assert outgoing.written + outgoing.pending == outgoing.accepted
    assert written == b"".join(parts)
