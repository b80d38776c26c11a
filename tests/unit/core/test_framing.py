"""Frames in a stream: every way of cutting it, and bytes that no peer of ours sent."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from farandole.core.framing import (
    HEADER,
    MAC_BYTES,
    FrameBuffer,
    FrameError,
    StreamSigner,
    StreamVerifier,
    keyed_hash,
    pack_frame,
    pack_json,
    read_json,
)

MOST = 64
KEY = b"k" * 32
tags = st.integers(0, 2**64 - 1)
frame_lists = st.lists(st.tuples(tags, st.binary(max_size=MOST)), max_size=6)


def feed_in_pieces(buffer: FrameBuffer, stream: bytes, cuts: list[int]) -> list[tuple[int, bytes]]:
    """Feed `stream` cut at `cuts`, from one memory that is written over before each piece, as receivers do."""
    room = bytearray(max(1, len(stream)))
    found, begin = [], 0
    for end in [*sorted(cut % (len(stream) + 1) for cut in cuts), len(stream)]:
        room[: end - begin] = stream[begin:end]
        found += [(tag, bytes(payload)) for tag, payload in buffer.feed(memoryview(room)[: end - begin])]
        begin = end
    return found


@given(frame_lists, st.lists(st.integers(0, 2**16), max_size=12))
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(
    frames: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(pack_frame(tag, payload, MOST) for tag, payload in frames)
    buffer = FrameBuffer(MOST)
    assert feed_in_pieces(buffer, stream, cuts) == frames
    assert buffer.waiting_bytes == 0


def test_the_header_is_sixteen_bytes_little_endian() -> None:
    assert pack_frame(1, b"ab", MOST) == b"\1" + 7 * b"\0" + b"\2" + 7 * b"\0" + b"ab"


def test_what_is_incomplete_waits() -> None:
    buffer = FrameBuffer(MOST)
    frame = pack_frame(7, b"abc", MOST)
    assert buffer.feed(frame[:-1]) == []
    assert buffer.waiting_bytes == len(frame) - 1
    assert [(tag, bytes(payload)) for tag, payload in buffer.feed(frame[-1:])] == [(7, b"abc")]


def test_the_bound_holds_on_both_sides() -> None:
    longest = bytes(MOST)
    assert bytes(FrameBuffer(MOST).feed(pack_frame(0, longest, MOST))[0][1]) == longest
    with pytest.raises(FrameError, match=r"a frame of 65 bytes: expected at most 64"):
        pack_frame(0, bytes(MOST + 1), MOST)
    with pytest.raises(FrameError, match=r"a frame of 65 bytes: expected at most 64"):
        FrameBuffer(MOST).feed(HEADER.pack(0, MOST + 1))


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_noise_is_refused_or_waits_and_never_takes_more_than_the_bound(noise: bytes, cuts: list[int]) -> None:
    buffer = FrameBuffer(MOST)
    try:
        for _, payload in feed_in_pieces(buffer, noise, cuts):
            assert len(payload) <= MOST
    except FrameError:
        return
    assert buffer.waiting_bytes < HEADER.size + MOST


@given(st.lists(st.binary(max_size=MOST), max_size=5), st.integers(0, 2**16))
def test_signed_frames_arrive(payloads: list[bytes], cut: int) -> None:
    signer, verifier = StreamSigner(KEY, MOST), StreamVerifier(KEY, MOST)
    stream = b"".join(signer.sign(payload) for payload in payloads)
    cut %= len(stream) + 1
    assert verifier.feed(stream[:cut]) + verifier.feed(stream[cut:]) == payloads


@given(st.data())
def test_a_signed_frame_with_any_bit_changed_is_refused_or_never_complete(data: st.DataObject) -> None:
    frame = bytearray(StreamSigner(KEY, MOST).sign(b"stop"))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(FrameError):
        assert StreamVerifier(KEY, MOST).feed(bytes(frame)) == []


def signed(count: int) -> list[bytes]:
    signer = StreamSigner(KEY, MOST)
    return [signer.sign(bytes([number])) for number in range(count)]


@pytest.mark.parametrize(
    "order", [[1], [0, 0], [0, 2], [1, 0]], ids=["left out", "repeated", "skipped", "reordered"]
)
def test_signed_frames_are_taken_in_order_only(order: list[int]) -> None:
    frames = signed(3)
    with pytest.raises(FrameError, match="not the one that comes next"):
        StreamVerifier(KEY, MOST).feed(b"".join(frames[number] for number in order))


def test_a_frame_of_another_key_is_refused() -> None:
    with pytest.raises(FrameError, match="not from our peer"):
        StreamVerifier(b"other", MOST).feed(signed(1)[0])


@pytest.mark.parametrize("length", [0, 1, MAC_BYTES - 1, MAC_BYTES])
def test_a_signed_frame_too_short_for_its_mac_is_refused(length: int) -> None:
    with pytest.raises(FrameError, match="not from our peer"):
        StreamVerifier(KEY, MOST).feed(struct.pack("<QQ", 0, length) + bytes(length))


def test_a_payload_too_long_is_not_counted_as_sent() -> None:
    signer, verifier = StreamSigner(KEY, MOST), StreamVerifier(KEY, MOST)
    with pytest.raises(FrameError, match="expected at most"):
        signer.sign(bytes(MOST + 1))
    assert verifier.feed(signer.sign(bytes(MOST))) == [bytes(MOST)]


def test_keyed_hashes_of_lists_that_join_to_the_same_bytes_differ() -> None:
    assert keyed_hash(KEY, b"ab", b"c") != keyed_hash(KEY, b"a", b"bc")
    assert keyed_hash(KEY, b"ab") != keyed_hash(KEY, b"ab", b"")


def test_json_messages() -> None:
    message = {"type": "stop", "ranks": [1, 2]}
    assert read_json(memoryview(pack_json(message))) == message


@pytest.mark.parametrize("payload", [b"", b"{", b"[]", b"{}", b'{"type": 1}', b"\xff", b"[" * 100_000])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError, match="expected a JSON object with a type"):
        read_json(payload)
