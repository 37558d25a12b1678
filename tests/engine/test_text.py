"""Tokens to text: whole characters, stop strings across tokens, characters left open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakv.engine.text import TextStream, join, open_character

PIECES = st.lists(st.binary(max_size=5), max_size=12)


def stream_of(pieces: list[bytes], **options) -> tuple[TextStream, list[str]]:
    stream = TextStream(lambda token: pieces[token], **options)
    return stream, [stream.feed(token) for token in range(len(pieces))]


@given(PIECES)
def test_what_is_streamed_is_the_whole_text(pieces: list[bytes]) -> None:
    stream, given_out = stream_of(pieces)
    assert "".join(given_out) + stream.finish() == join(pieces) == stream.text


@given(st.text(max_size=30), st.integers(1, 4))
def test_characters_come_whole_however_the_bytes_are_cut(text: str, size: int) -> None:
    data = text.encode()
    stream, given_out = stream_of([data[i : i + size] for i in range(0, len(data), size)])
    assert "�" not in "".join(given_out).replace("�" if "�" in text else "", "")
    assert "".join(given_out) + stream.finish() == text


@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_given_out(text: str, stops: list[str]) -> None:
    stream, given_out = stream_of([letter.encode() for letter in text], stops=stops)
    rest = stream.finish()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert "".join(given_out) + rest == text
        assert not stream.stopped
        return
    seen = text[: min(ends)]  # the stop that is complete first ends the reply
    expected = seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert stream.stopped
    assert "".join(given_out) + rest == stream.text == expected


def test_after_a_stop_string_nothing_more_comes() -> None:
    stream, given_out = stream_of([b"one ST", b"OP two", b" three"], stops=["STOP"])
    assert given_out == ["one ", "", ""]
    assert stream.finish() == ""


def test_a_character_begun_before_is_completed() -> None:
    euro = "€".encode()
    stream = TextStream(lambda _: euro[2:], prime=euro[:2])
    assert stream.feed(0) == "€"


@pytest.mark.parametrize(
    ("pieces", "left_open"),
    [
        ([], b""),
        ([b"abc"], b""),
        (["é".encode()], b""),
        ([b"a", "é".encode()[:1]], "é".encode()[:1]),
        (["😀".encode()[:2], "😀".encode()[2:3]], "😀".encode()[:3]),
        (["😀".encode()], b""),
        ([b"\x80\x80\x80\x80\x80"], b""),
    ],
)
def test_an_open_character_is_recognised(pieces: list[bytes], left_open: bytes) -> None:
    assert open_character(pieces) == left_open
