"""framing: the same events however the stream is split, one fault at most, no fd lost."""

import struct
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wcache_async.errors import (
    BadMagic,
    FdsTruncated,
    FdsUndeclared,
    FrameTooLarge,
    MalformedMessage,
    ProtocolError,
    TruncatedFrame,
    VersionMismatch,
)
from wcache_async.protocol.framing import (
    HEADER_NBYTES,
    MAX_FDS_PER_MESSAGE,
    EndOfStream,
    Frame,
    FrameDecoder,
    FrameFault,
    Segment,
    encode_frame,
)

MAX_BODY = 1 << 16
MAX_FDS = 600

Item = Frame[int] | FrameFault | EndOfStream


@dataclass
class Reader:
    """A decoder, and an account of every fd that went in and came out."""

    decoder: FrameDecoder[int] = field(default_factory=lambda: FrameDecoder(max_body=MAX_BODY, max_fds=MAX_FDS))
    given: list[int] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)

    def read(self, data: bytes, fds: Iterable[int] = ()) -> "Reader":
        fds = list(fds)
        self.given += fds
        self.decoder.receive_data(data, fds)
        return self.drain()

    def eof(self) -> "Reader":
        self.decoder.receive_eof()
        return self.drain()

    def drain(self) -> "Reader":
        while (item := self.decoder.next_event()) is not None:
            self.items.append(item)
        return self

    def frames(self) -> list[Frame[int]]:
        return [item for item in self.items if isinstance(item, Frame)]

    def end(self) -> FrameFault | EndOfStream | None:
        """How the stream ended: nothing may come after that."""
        for item in self.items[:-1]:
            assert isinstance(item, Frame)
        last = self.items[-1] if self.items else None
        return None if isinstance(last, Frame) else last

    def fault(self) -> ProtocolError:
        end = self.end()
        assert isinstance(end, FrameFault)
        return end.error

    def check_fds(self) -> "Reader":
        """Every fd came out once, in order: with a frame, or by take_fds."""
        claimed = [fd for frame in self.frames() for fd in frame.fds]
        assert claimed + self.decoder.take_fds() == self.given
        assert self.decoder.take_fds() == []
        return self


def header(
    *, magic: bytes = b"WCAC", version: int = 1, flags: int = 0, nfds: int = 0, length: int = 0, request_id: int = 7
) -> bytes:
    return struct.pack("<4sBBHIQ", magic, version, flags, nfds, length, request_id)


def joined(segments: Sequence[Segment[int]]) -> bytes:
    return b"".join(segment.data for segment in segments)


@st.composite
def frame_lists(draw: st.DrawFn) -> list[Frame[int]]:
    sizes = st.sampled_from([0, 0, 0, 1, 2, 252, 253, 254, 506, 507, 600])
    next_fd = 0
    frames: list[Frame[int]] = []
    for nfds in draw(st.lists(sizes, max_size=6)):
        fds = tuple(range(next_fd, next_fd + nfds))
        next_fd += nfds
        frames.append(Frame(draw(st.integers(0, 2**64 - 1)), draw(st.binary(max_size=50)), fds))
    return frames


@st.composite
def kernel_reads(draw: st.DrawFn, segments: Sequence[Segment[int]]) -> list[tuple[bytes, tuple[int, ...]]]:
    """The segments as recvmsg may give them.

    A send with fds may take only part of its segment, the rest following as a plain send.
    Plain sends merge with what follows; a read that took fds ends with that send at the
    latest (unix_stream_read_generic leaves its loop there); fds come with the first byte.
    """
    stream = joined(segments)
    fds_at: dict[int, tuple[int, ...]] = {}
    cuts = set(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    position = 0
    for segment in segments:
        if segment.fds:
            fds_at[position] = segment.fds
            cuts.add(draw(st.integers(position + 1, position + len(segment.data))))
        position += len(segment.data)
    edges = sorted(cuts | {0, len(stream)})
    reads = []
    for start, end in pairwise(edges):
        fds = [fds for at, fds in fds_at.items() if start <= at < end]
        assert len(fds) <= 1
        reads.append((stream[start:end], fds[0] if fds else ()))
    return reads


@given(data=st.data(), frames=frame_lists())
def test_any_split_gives_the_same_frames(data: st.DataObject, frames: list[Frame[int]]) -> None:
    segments = [segment for f in frames for segment in encode_frame(f.request_id, f.body, f.fds)]
    reader = Reader()
    for chunk, fds in data.draw(kernel_reads(segments)):
        reader.read(chunk, fds)
    reader.eof()
    assert reader.frames() == frames
    assert reader.end() == EndOfStream()
    reader.check_fds()


@pytest.mark.parametrize("step", [1, 2, 3, 7, 19, 20, 21])
def test_a_stream_read_in_equal_steps_gives_the_same_frames(step: int) -> None:
    segments = [
        *encode_frame(1, b"plain"),
        *encode_frame(2, b"with fds", (1, 2)),
        *encode_frame(3, b""),
        *encode_frame(4, b"many", tuple(range(3, 303))),
    ]
    reader = Reader()
    for segment in segments:
        for start in range(0, len(segment.data), step):
            reader.read(segment.data[start : start + step], segment.fds if start == 0 else ())
    assert [(f.request_id, f.body, len(f.fds)) for f in reader.frames()] == [
        (1, b"plain", 0),
        (2, b"with fds", 2),
        (3, b"", 0),
        (4, b"many", 300),
    ]
    assert reader.eof().end() == EndOfStream()
    reader.check_fds()


def test_a_plain_frame_read_together_with_the_next_ones_fds_does_not_claim_them() -> None:
    reader = Reader().read(joined([*encode_frame(1, b"plain"), *encode_frame(2, b"owner", (5,))]), [5])
    assert [(f.body, f.fds) for f in reader.frames()] == [(b"plain", ()), (b"owner", (5,))]
    reader.check_fds()


@pytest.mark.parametrize("receive", [bytes, bytearray, memoryview])
def test_a_body_does_not_alias_what_was_received(receive: type[bytes | bytearray | memoryview]) -> None:
    source = bytearray(joined(encode_frame(1, b"body")))
    decoder: FrameDecoder[int] = FrameDecoder(max_body=10)
    decoder.receive_data(receive(source))
    source[:] = bytes(len(source))
    frame = decoder.next_event()
    assert frame == Frame(1, b"body", ())
    assert type(frame.body) is bytes


# ----------------------------------------------------------------------------------- encoding
def test_header_bytes_are_these() -> None:
    assert encode_frame(0x0102030405060708, b"body", ("a", "b")) == [
        Segment(
            b"WCAC"  # magic
            b"\x01"  # version
            b"\x00"  # flags
            b"\x02\x00"  # fds
            b"\x04\x00\x00\x00"  # length of the body
            b"\x08\x07\x06\x05\x04\x03\x02\x01"  # request id
            b"body",
            ("a", "b"),
        )
    ]
    assert HEADER_NBYTES == 20


def test_fds_beyond_what_one_send_takes_go_ahead_in_frames_without_a_body() -> None:
    fds = tuple(range(2 * MAX_FDS_PER_MESSAGE + 1))
    first, second, last = encode_frame(9, b"body", fds)
    assert first == Segment(b"WCAC\x01\x01\xfd\x00" + bytes(4) + b"\x09" + bytes(7), fds[:253])
    assert second == Segment(first.data, fds[253:506])
    assert last == Segment(b"WCAC\x01\x00\x01\x00\x04\x00\x00\x00\x09" + bytes(7) + b"body", fds[506:])


@pytest.mark.parametrize(("nfds", "segments"), [(0, 1), (1, 1), (253, 1), (254, 2), (506, 2), (507, 3)])
def test_no_segment_carries_more_fds_than_the_kernel_takes(nfds: int, segments: int) -> None:
    encoded = encode_frame(1, b"", tuple(range(nfds)))
    assert len(encoded) == segments
    assert max(len(segment.fds) for segment in encoded) <= MAX_FDS_PER_MESSAGE
    assert [fd for segment in encoded for fd in segment.fds] == list(range(nfds))


# ------------------------------------------------------------------------------------- faults
@pytest.mark.parametrize("right", range(4))
def test_wrong_magic_is_told_at_its_first_wrong_byte(right: int) -> None:
    reader = Reader().read(b"WCAC"[:right])
    assert reader.items == []
    reader.read(b"\x00")
    assert isinstance(reader.fault(), BadMagic)
    assert reader.fault().details() == {"got": (b"WCAC"[:right] + b"\x00").hex()}


def test_another_protocols_greeting_is_no_frame() -> None:
    fault = Reader().read(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").fault()
    assert isinstance(fault, BadMagic)
    assert bytes.fromhex(fault.got) == b"GET / HTTP/1.1\r\n"


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_header_version_is_refused_by_name(version: int) -> None:
    fault = Reader().read(header(version=version)).fault()
    assert isinstance(fault, VersionMismatch)
    assert (fault.ours, fault.theirs) == ([1, 1], [version, version])


def test_a_body_over_the_cap_is_refused_by_its_header_alone() -> None:
    reader = Reader().read(header(length=MAX_BODY + 1, request_id=3))
    assert reader.items == [FrameFault(reader.fault(), 3)]
    assert reader.fault().details() == {"length": MAX_BODY + 1, "limit": MAX_BODY}
    assert isinstance(reader.fault(), FrameTooLarge)


def test_a_body_of_just_the_cap_is_taken() -> None:
    body = bytes(MAX_BODY)
    assert Reader().read(joined(encode_frame(1, body))).frames() == [Frame(1, body)]


def test_the_cap_may_change_between_two_frames_received_together() -> None:
    decoder: FrameDecoder[int] = FrameDecoder(max_body=4)
    decoder.receive_data(joined([*encode_frame(1, b"1234"), *encode_frame(2, b"12345678")]))
    assert decoder.next_event() == Frame(1, b"1234")
    decoder.max_body = 8
    assert decoder.next_event() == Frame(2, b"12345678")


@pytest.mark.parametrize("arrived", [0, 1, 2])
def test_fewer_fds_than_declared_are_a_fault(arrived: int) -> None:
    reader = Reader().read(header(nfds=3), range(arrived))
    fault = reader.check_fds().fault()
    assert isinstance(fault, FdsTruncated)
    assert (fault.expected, fault.got) == (3, arrived)


@pytest.mark.parametrize(("declared", "arrived"), [(0, 1), (1, 2), (2, 253)])
@pytest.mark.parametrize("shown", [HEADER_NBYTES, HEADER_NBYTES + 2, HEADER_NBYTES + 4])
def test_more_fds_than_declared_are_a_fault(declared: int, arrived: int, shown: int) -> None:
    """Told by the header alone; where the body came too its frame is whole, and delivered first."""
    reader = Reader().read((header(nfds=declared, length=4) + b"body")[:shown], range(arrived))
    fault = reader.check_fds().fault()
    assert isinstance(fault, FdsUndeclared)
    whole = shown == HEADER_NBYTES + 4
    assert (fault.expected, fault.got) == ((0, arrived - declared) if whole else (declared, arrived))
    assert len(reader.frames()) == whole


@pytest.mark.parametrize("frames_before", [0, 2])
def test_fds_between_two_frames_belong_to_none(frames_before: int) -> None:
    reader = Reader().read(joined(encode_frame(1, b"x")) * frames_before, [4])
    assert isinstance(reader.check_fds().fault(), FdsUndeclared)
    assert len(reader.frames()) == frames_before


@pytest.mark.parametrize("max_fds", [0, 2, 300])
def test_fds_beyond_what_is_taken_at_all_are_refused_before_the_header_is_whole(max_fds: int) -> None:
    reader = Reader(FrameDecoder(max_body=MAX_BODY, max_fds=max_fds)).read(b"W", range(max_fds + 1))
    assert isinstance(reader.check_fds().fault(), FdsUndeclared)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(header(flags=0x02), id="unknown flag"),
        pytest.param(header(flags=0x81, nfds=1), id="unknown flag beside a known one"),
        pytest.param(header(flags=0x01), id="fds-only frame without fds"),
        pytest.param(header(flags=0x01, nfds=1, length=1), id="fds-only frame with a body"),
        pytest.param(header(nfds=254), id="more fds than one send can carry"),
        pytest.param(header(flags=0x01, nfds=200) + header(flags=0x01, nfds=200) + header(nfds=201), id="over max_fds"),
    ],
)
def test_a_header_that_cannot_be_meant_is_a_fault(bad: bytes) -> None:
    reader = Reader()
    for start in range(0, len(bad), HEADER_NBYTES):
        nfds = int.from_bytes(bad[start + 6 : start + 8], "little")
        reader.read(bad[start : start + HEADER_NBYTES], range(start * 1000, start * 1000 + nfds))
    assert isinstance(reader.check_fds().fault(), MalformedMessage)
    assert reader.frames() == []


def test_fds_sent_ahead_belong_to_the_request_they_name() -> None:
    reader = Reader().read(header(flags=0x01, nfds=2, request_id=1), [1, 2])
    reader.read(header(request_id=2))
    fault = reader.check_fds().fault()
    assert isinstance(fault, MalformedMessage)
    assert "request 1" in str(fault)
    assert "request 2" in str(fault)


@pytest.mark.parametrize("nfds", [0, 2, 300])
def test_a_stream_may_end_between_frames_only(nfds: int) -> None:
    segments = encode_frame(5, b"body", tuple(range(nfds)))
    stream = joined(segments)
    for length in range(len(stream) + 1):
        reader, position = Reader(), 0
        for segment in segments:
            part = segment.data[: max(length - position, 0)]
            if part:
                reader.read(part, segment.fds)
            position += len(segment.data)
        reader.eof()
        if length in (0, len(stream)):
            assert reader.end() == EndOfStream()
        else:
            fault = reader.fault()
            assert isinstance(fault, TruncatedFrame)
            assert fault.got < fault.expected
            assert reader.frames() == []
            if length >= HEADER_NBYTES:
                assert reader.items == [FrameFault(fault, 5)]
        reader.check_fds()


def test_a_fault_of_the_transport_ends_the_stream_behind_what_was_whole() -> None:
    lost = FdsTruncated(expected=2, got=1)
    reader = Reader().read(joined(encode_frame(1, b"whole")))
    reader.decoder.receive_data(header(nfds=1, request_id=8)[:10], [1])
    reader.given.append(1)
    reader.decoder.receive_fault(lost)
    reader.decoder.receive_fault(BadMagic(got=""))
    reader.drain()
    assert reader.frames() == [Frame(1, b"whole")]
    assert reader.fault() is lost
    reader.check_fds()


def test_after_a_fault_nothing_is_decoded_and_fds_are_still_handed_over() -> None:
    reader = Reader().read(b"junk", [1])
    ended = list(reader.items)
    reader.read(joined(encode_frame(1, b"body", (2,))), [2]).eof()
    assert reader.items == ended
    assert reader.decoder.take_fds() == [1, 2]


def test_after_end_nothing_is_decoded_and_fds_are_still_handed_over() -> None:
    reader = Reader().read(header(nfds=1, length=9) + b"half", [1])
    reader.decoder.end()
    reader.read(b" a body", [2]).eof()
    assert reader.items == []
    assert reader.decoder.take_fds() == [1, 2]


def test_after_a_fault_bytes_are_not_kept() -> None:
    reader = Reader().read(b"junk")
    chunk = bytes(1 << 16)
    tracemalloc.start()
    for _ in range(256):
        reader.decoder.receive_data(chunk)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < len(chunk)
    assert held < 4096


# --------------------------------------------------------------------------------------- fuzz
@st.composite
def hostile_streams(draw: st.DrawFn) -> bytes:
    """Random bytes, headers with random fields, and good frames with bytes changed."""
    parts = draw(
        st.lists(
            st.one_of(
                st.binary(max_size=60),
                st.builds(
                    header,
                    version=st.sampled_from([1, 1, 1, 1, 0, 2]),
                    flags=st.sampled_from([0, 0, 0, 1, 1, 2, 255]),
                    nfds=st.sampled_from([0, 0, 1, 2, 253, 254, 65535]),
                    length=st.sampled_from([0, 1, 5, MAX_BODY, MAX_BODY + 1, 2**32 - 1]),
                    request_id=st.integers(0, 3),
                ),
                st.binary(max_size=20).map(lambda body: joined(encode_frame(1, body))),
            ),
            max_size=8,
        )
    )
    stream = bytearray(b"".join(parts))
    if stream:
        for at in draw(st.lists(st.integers(0, len(stream) - 1), max_size=2)):
            stream[at] = draw(st.integers(0, 255))
    return bytes(stream)


@given(
    stream=hostile_streams(),
    cuts=st.lists(st.integers(0, 500), max_size=10),
    fds=st.lists(st.integers(0, 4), max_size=12),
    eof=st.booleans(),
)
def test_whatever_comes_there_is_no_exception_one_end_and_every_fd(
    stream: bytes, cuts: list[int], fds: list[int], eof: bool
) -> None:
    reader = Reader()
    edges = sorted({0, *(cut for cut in cuts if cut < len(stream)), len(stream)})
    for number, (start, end) in enumerate(pairwise(edges)):
        count = fds[number] if number < len(fds) else 0
        reader.read(stream[start:end], range(number * 10, number * 10 + count))
    if eof:
        reader.eof()
        assert reader.end() is not None
    reader.end()
    reader.check_fds()
