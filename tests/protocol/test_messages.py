"""messages: these bytes on the wire, every message back as it went, and only typed refusals."""

import tracemalloc
from collections.abc import Callable
from typing import get_args

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.msgpack import decode, encode

from wcache_async.errors import (
    ConfigMismatch,
    InsufficientMemory,
    MalformedMessage,
    ProtocolError,
    RemoteError,
    SourceError,
    StateNotFound,
    UnknownMessage,
)
from wcache_async.manifest import Config, FileStamp, Origin
from wcache_async.protocol.messages import (
    Abandon,
    AbandonResponse,
    BuildTicket,
    Claim,
    ErrorResponse,
    FetchDigests,
    FetchDigestsResponse,
    FetchState,
    FetchStateResponse,
    Health,
    Hello,
    Limits,
    Load,
    LoadProgress,
    LoadResponse,
    Message,
    Pin,
    PinResponse,
    Publish,
    PublishResponse,
    Release,
    ReleaseResponse,
    Request,
    Response,
    StateStatus,
    Status,
    StatusResponse,
    Stop,
    StopResponse,
    Unload,
    UnloadResponse,
    Welcome,
    decode_request,
    decode_response,
    encode_message,
    type_of,
)

STATE_STATUS = StateStatus(
    name="llama-8b",
    rank=1,
    phase="failed",
    generation=2,
    tensors=291,
    bytes=1 << 34,
    bytes_done=5,
    backends=("shm_fd",),
    leases=3,
    config={"dtype": "bfloat16", "tp_size": 2, "scale": 0.5, "tied": True, "revision": None},
    error="no such file",
    source="safetensors",
    pinned=True,
    digest="00ff",
    stale=True,
)

FULL: list[Message] = [
    Hello(versions=(1, 3), client="engine", pid=42, backends=("vmm_fd", "shm_fd")),
    FetchState(name="m", rank=3, expect={"tp_size": 2}, timeout=1.5, backends=("shm_fd",), progress=True),
    FetchDigests(lease=2**63 - 1),
    Release(lease=2**63 - 1),
    Status(),
    Load(
        path="/models/m",
        name="m",
        rank=1,
        source="safetensors",
        dtype="bfloat16",
        backend="shm_fd",
        config={"revision": "abc"},
        options={"revision": "abc"},
        replace=True,
        wait=False,
        progress=True,
    ),
    Unload(name="m", rank=0),
    Publish(
        name="m",
        rank=1,
        config={"tp_size": 2},
        manifest_nbytes=4,
        transport_backend="shm_fd",
        manifest=b"\x95\x90\x90\x90",
        payload=b"\x01",
        ticket=7,
        replace=True,
        source="Llama",
    ),
    Claim(name="m", rank=1, config={"tp_size": 2}, timeout=1.5, progress=True),
    Abandon(ticket=7),
    Pin(name="m", rank=1, pinned=False),
    Stop(),
    Welcome(
        version=1,
        server="wcache 0.1",
        pid=9,
        instance="f00d",
        limits=Limits(max_request_bytes=65536, max_requests_in_flight=64),
    ),
    LoadProgress(bytes_done=1, bytes_total=2),
    FetchStateResponse(
        name="m",
        rank=1,
        generation=2,
        lease=3,
        config={"dtype": "float32"},
        manifest_nbytes=4,
        transport_backend="shm_fd",
        manifest=b"\x94\x90\x90\x90",
        payload=b"\x01",
        resident_bytes=64,
        digest="00ff",
        origin=Origin(
            files=(FileStamp(b"/m/\xff.safetensors", 2**40, 2**64 - 1, 2**40, -1),),
            mount_namespace=4026531841,
            local=True,
        ),
    ),
    FetchDigestsResponse(digests=b"\x00" * 16),
    ReleaseResponse(),
    StatusResponse(
        version="0.1.0",
        pid=9,
        socket="/run/s",
        uptime_s=0.25,
        clients=2,
        states=(STATE_STATUS,),
        draining=True,
        health=Health(
            fds=20,
            mappings=3,
            memory_bytes=2**30,
            tasks=4,
            leases=1,
            generations=2,
            worst_loop_stall_s=0.01,
            worst_loop_stall_computing_s=0.005,
            loop_stalls_beyond=((0.02, 3), (0.05, 0)),
        ),
    ),
    LoadResponse(state=STATE_STATUS),
    UnloadResponse(unloaded=("m:0", "m:1"), bytes=7),
    PublishResponse(state=STATE_STATUS),
    BuildTicket(ticket=7),
    AbandonResponse(),
    PinResponse(states=("m:0",)),
    StopResponse(pid=9),
    ErrorResponse(code="state_not_found", message="no", hint="load it", details={"name": "m", "available": ["n:0"]}),
]
"""One of each, no field left at its default, so that none is lost unseen."""


def decoder_of(message: Message) -> Callable[[bytes], Message]:
    return decode_request if isinstance(message, Request) else decode_response


def by_type(message: Message) -> str:
    return type_of(message)


def test_every_message_is_tried_here_with_every_field_set() -> None:
    assert {type(message) for message in FULL} == set(get_args(Message))
    for message in FULL:
        for f in msgspec.structs.fields(type(message)):
            default = f.default_factory() if f.default_factory is not msgspec.NODEFAULT else f.default
            assert getattr(message, f.name) != default, (type(message), f.name)


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_a_message_comes_back_as_it_went(message: Message) -> None:
    assert decoder_of(message)(encode_message(message)) == message


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_fields_left_at_their_default_are_not_sent_and_come_back(message: Message) -> None:
    required = {f.name: getattr(message, f.name) for f in msgspec.structs.fields(type(message)) if f.required}
    least = type(message)(**required)
    body = encode_message(least)
    assert set(decode(body)) == {"type", *required}
    assert decoder_of(least)(body) == least


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_fields_of_a_newer_peer_are_ignored(message: Message) -> None:
    fields = decode(encode_message(message))
    newer = {"a_new_field": {"nested": [1, None]}, **fields, "another": "x"}
    assert decoder_of(message)(encode(newer)) == message


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_a_field_of_the_wrong_type_is_refused_by_name(message: Message) -> None:
    fields = decode(encode_message(message))
    for name in fields.keys() - {"type"}:
        with pytest.raises(MalformedMessage) as caught:
            decoder_of(message)(encode({**fields, name: [[[]]]}))
        assert caught.value.reason.startswith(f"{type_of(message)}: ")
        assert f"$.{name}" in caught.value.reason


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_a_missing_field_is_refused_by_name(message: Message) -> None:
    for f in msgspec.structs.fields(type(message)):
        fields = decode(encode_message(message))
        del fields[f.name]
        if f.required:
            with pytest.raises(MalformedMessage, match=f"required field `{f.name}`"):
                decoder_of(message)(encode(fields))


@pytest.mark.parametrize("message", FULL, ids=by_type)
def test_a_message_in_the_wrong_direction_is_unknown(message: Message) -> None:
    other = decode_response if isinstance(message, Request) else decode_request
    with pytest.raises(UnknownMessage) as caught:
        other(encode_message(message))
    assert caught.value.type == type_of(message)


def test_types_are_unique_across_both_directions() -> None:
    assert len({type_of(message) for message in FULL}) == len(FULL)


# ------------------------------------------------------------------------------- golden bytes
@pytest.mark.parametrize(
    ("message", "body"),
    [
        (
            Hello(versions=(1, 2), client="e", pid=300, backends=("shm_fd",)),
            b"\x85\xa4type\xa5hello\xa8versions\x92\x01\x02\xa6client\xa1e\xa3pid\xcd\x01\x2c\xa8backends\x91\xa6shm_fd",
        ),
        (
            FetchState(name="m", rank=1, expect={"tp": 2}, timeout=1.5),
            b"\x85\xa4type\xabfetch_state\xa4name\xa1m\xa4rank\x01\xa6expect\x81\xa2tp\x02"
            b"\xa7timeout\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00",
        ),
        (
            FetchStateResponse(
                name="m",
                rank=0,
                generation=1,
                lease=2,
                config={},
                manifest_nbytes=40000,
                transport_backend="shm_fd",
                payload=b"\xff",
            ),
            b"\x89\xa4type\xb4fetch_state_response\xa4name\xa1m\xa4rank\x00\xaageneration\x01\xa5lease\x02"
            b"\xa6config\x80\xafmanifest_nbytes\xcd\x9c\x40\xb1transport_backend\xa6shm_fd\xa7payload\xc4\x01\xff",
        ),
        (
            ErrorResponse(code="draining", message="the daemon stops", details={"n": [1, None]}),
            b"\x84\xa4type\xa5error\xa4code\xa8draining\xa7message\xb0the daemon stops\xa7details\x81\xa1n\x92\x01\xc0",
        ),
    ],
    ids=lambda value: type_of(value) if not isinstance(value, bytes) else "",
)
def test_these_are_the_bytes(message: Message, body: bytes) -> None:
    assert encode_message(message) == body
    assert decoder_of(message)(body) == message


# ------------------------------------------------------------------------------------- values
@pytest.mark.parametrize(
    "fields",
    [
        {"type": "fetch_state", "name": "m", "rank": -1},
        {"type": "fetch_state", "name": "m", "rank": 2**63},
        {"type": "fetch_state", "name": "m", "rank": 1.5},
        {"type": "fetch_state", "name": "m", "rank": True},
        {"type": "fetch_state", "name": "m", "rank": "1"},
        {"type": "fetch_state", "name": "m", "timeout": -1.0},
        {"type": "fetch_state", "name": "m", "timeout": float("nan")},
        {"type": "fetch_state", "name": None},
        {"type": "fetch_state", "name": b"m"},
        {"type": "fetch_state", "name": "m", "expect": {"f": [1]}},
        {"type": "fetch_state", "name": "m", "expect": {1: 1}},
        {"type": "release", "lease": -1},
        {"type": "hello", "versions": [1]},
        {"type": "hello", "versions": [1, 1, 1]},
        {"type": "hello", "versions": [-1, 1]},
        {"type": "hello", "versions": [1, 2**64 - 1]},
    ],
    ids=str,
)
def test_values_that_cannot_be_meant_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(MalformedMessage):
        decode_request(encode(fields))


def test_numbers_of_a_config_keep_their_type() -> None:
    config: Config = {"i": 1, "f": 1.0, "b": True, "s": "1", "n": None}
    message = decode_request(encode_message(FetchState(name="m", expect=config)))
    assert isinstance(message, FetchState)
    assert {k: type(v) for k, v in message.expect.items()} == {k: type(v) for k, v in config.items()}


@pytest.mark.parametrize("name", ["\ud800", "x" * 10 + "\udcff"])
def test_lone_surrogates_are_refused_at_the_sender(name: str) -> None:
    with pytest.raises(MalformedMessage, match="fetch_state cannot be encoded"):
        encode_message(FetchState(name=name))


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1])
def test_integers_beyond_64_bits_are_refused_at_the_sender(number: int) -> None:
    with pytest.raises(MalformedMessage, match="fetch_state cannot be encoded"):
        encode_message(FetchState(name="m", expect={"n": number}))


# ------------------------------------------------------------------------------------- errors
def test_an_error_crosses_the_wire_as_its_own_class() -> None:
    sent = ConfigMismatch(name="m", rank=0, differences={"dtype": ["float32", "bfloat16"]})
    response = decode_response(encode_message(ErrorResponse.of(sent)))
    assert isinstance(response, ErrorResponse)
    got = response.to_error()
    assert isinstance(got, ConfigMismatch)
    assert (got.details(), str(got)) == (sent.details(), str(sent))


def test_an_error_about_a_file_name_that_is_no_utf8_can_be_sent() -> None:
    """os.fsdecode turns such bytes into lone surrogates, which UTF-8 cannot carry."""
    sent = SourceError(path="/models/\udcff", reason="no such file \udc80")
    response = decode_response(encode_message(ErrorResponse.of(sent)))
    assert isinstance(response, ErrorResponse)
    assert response.to_error().details() == {
        "path": "/models/\\udcff",
        "reason": "no such file \\udc80",
        "tensor": "",
        "advice": "",
    }


def test_an_error_with_impossible_numbers_can_be_sent() -> None:
    sent = InsufficientMemory(needed=2**70, available=-(2**70), limit="RAM")
    response = decode_response(encode_message(ErrorResponse.of(sent)))
    assert isinstance(response, ErrorResponse)
    got = response.to_error()
    assert isinstance(got, InsufficientMemory)
    assert (got.needed, got.available) == (2**64 - 1, -(2**63))


def test_an_error_of_a_newer_peer_keeps_its_words() -> None:
    got = ErrorResponse(code="from_the_future", message="so it is", hint="Wait", details={"x": 1}).to_error()
    assert isinstance(got, RemoteError)
    assert str(got) == "so it is (from_the_future). Wait"


def test_an_error_whose_fields_do_not_fit_keeps_its_words() -> None:
    got = ErrorResponse(code=StateNotFound.code, message="none such", details={"name": 5}).to_error()
    assert isinstance(got, RemoteError)
    assert got.remote_code == StateNotFound.code
    assert got.remote_message == "none such"


# ------------------------------------------------------------------------------------ hostile
STATUS_PLUS = b"\x82\xa4type\xa6status\xa1x"
"""A status request with one more field, whose value is to follow."""


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\xc1", id="reserved opcode"),
        pytest.param(b"\xc0", id="nil"),
        pytest.param(b"\x80", id="empty map"),
        pytest.param(encode(["status"]), id="array"),
        pytest.param(encode({"type": 5}), id="type is a number"),
        pytest.param(encode({"type": None}), id="type is nil"),
        pytest.param(b"\x81\xc4\x04type\xa6status", id="keys are bytes"),
        pytest.param(encode({"type": "status"})[:-1], id="cut short"),
        pytest.param(encode({"type": "status"}) + b"\x00", id="trailing byte"),
        pytest.param(b"\x81\xa4type\xa3\xed\xa0\x80", id="surrogate in UTF-8"),
        pytest.param(b"\x81\xa4type\xa1\xff", id="no UTF-8"),
        pytest.param(b"\x81\xa4type\xdb\xff\xff\xff\xff", id="string of 4 GiB"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="map of 4 billion"),
        pytest.param(STATUS_PLUS + b"\xdd\xff\xff\xff\xff", id="array of 4 billion"),
        pytest.param(STATUS_PLUS + b"\xdf\xff\xff\xff\xff", id="map of 4 billion inside"),
        pytest.param(STATUS_PLUS + b"\xc6\xff\xff\xff\xff", id="binary of 4 GiB"),
        pytest.param(STATUS_PLUS + b"\xc9\xff\xff\xff\xff\x00", id="extension of 4 GiB"),
        pytest.param(STATUS_PLUS + b"\x91" * 60_000, id="nested 60,000 deep"),
        pytest.param(STATUS_PLUS + b"\x81\xa1k" * 20_000, id="maps nested 20,000 deep"),
        pytest.param(b"\x91" * 60_000, id="nothing but nesting"),
        pytest.param(b"\x81" * 60_000, id="nesting in keys"),
    ],
)
@pytest.mark.parametrize("decode_body", [decode_request, decode_response])
def test_a_body_that_is_no_message_is_refused_without_taking_memory(
    body: bytes, decode_body: Callable[[bytes], Message]
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessage) as caught:
            decode_body(body)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert len(caught.value.reason) <= 300


@pytest.mark.parametrize("decode_body", [decode_request, decode_response])
def test_an_unknown_type_is_named_no_longer_than_needed(decode_body: Callable[[bytes], Message]) -> None:
    with pytest.raises(UnknownMessage) as caught:
        decode_body(encode({"type": "x" * 60_000}))
    assert caught.value.type == "x" * 64


def test_a_refusal_does_not_repeat_the_body() -> None:
    """msgspec quotes the value; with trailing bytes the type cannot be told on its own."""
    with pytest.raises(MalformedMessage) as caught:
        decode_request(encode({"type": "x" * 60_000}) + b"\x00")
    assert len(str(caught.value)) < 500


@given(body=st.binary(max_size=200))
@example(body=STATUS_PLUS + b"\xc7\x00\x00")
def test_random_bytes_are_refused_or_decoded(body: bytes) -> None:
    for decode_body in (decode_request, decode_response):
        try:
            decode_body(body)
        except ProtocolError as error:
            assert isinstance(error, MalformedMessage | UnknownMessage)  # noqa: PT017


@given(message=st.sampled_from(FULL), at=st.integers(0, 10_000), byte=st.integers(0, 255), cut=st.integers(0, 10_000))
def test_a_damaged_message_is_refused_or_decoded(message: Message, at: int, byte: int, cut: int) -> None:
    body = bytearray(encode_message(message))
    body[at % len(body)] = byte
    del body[len(body) - cut % 3 :]
    try:
        decoder_of(message)(bytes(body))
    except ProtocolError as error:
        assert isinstance(error, MalformedMessage | UnknownMessage)  # noqa: PT017


_scalars = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary()
)
_keys = st.text(max_size=5)
_lists = st.lists(_scalars, max_size=3)
_values = _scalars | _lists | st.dictionaries(_keys, _scalars | _lists, max_size=3) | st.lists(_lists, max_size=2)


@given(
    fields=st.dictionaries(
        st.sampled_from(sorted({f.encode_name for m in FULL for f in msgspec.structs.fields(type(m))})), _values
    ),
    kind=st.sampled_from([type_of(message) for message in FULL]),
)
def test_any_values_in_known_fields_are_refused_or_make_a_message_that_can_be_sent(
    fields: dict[str, object], kind: str
) -> None:
    body = encode({**fields, "type": kind})
    is_request = kind in {type_of(m) for m in FULL if isinstance(m, Request)}
    try:
        message = decode_request(body) if is_request else decode_response(body)
    except MalformedMessage:
        return
    assert encode_message(message)


def test_both_unions_are_told_apart() -> None:
    assert not set(get_args(Request)) & set(get_args(Response))
