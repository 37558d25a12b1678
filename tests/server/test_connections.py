"""Clients that hold on to connections: how many they may have, for how long, and who has to leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest

from llamakv.server import connections as connections_module
from llamakv.server.connections import Crowd, is_loopback
from llamakv.server.contract import AnswerPiece
from tests.server.fake_service import FOREVER, say
from tests.server.keeping_service import KeepingService, serving

PATIENCE_S = 30.0
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: "


def question(**more: object) -> bytes:
    """A request for text, as bytes."""
    body = json.dumps({"messages": [{"role": "user", "content": "hi"}], **more}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@contextmanager
def connected(url: str, *, n_buffer: int | None = None) -> Iterator[socket.socket]:
    """A client, with a buffer of so many bytes for what it does not read."""
    with socket.socket() as client:
        if n_buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, n_buffer)
        client.settimeout(PATIENCE_S)
        client.connect(("127.0.0.1", urlsplit(url).port or 0))
        yield client


def is_dropped(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def answer_of(client: socket.socket, request: bytes = HEALTH) -> bytes:
    """The beginning of the answer to a request, all of which is read."""
    client.sendall(request)
    told = b""
    while not told.endswith(b'{"status":"ok"}'):
        told += client.recv(1000)
    return told[:15]


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1", "::1%lo", "::ffff:127.0.0.1"])
def test_loopback_addresses_are_known(address: str) -> None:
    assert is_loopback(address) is True


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "fe80::1%eth0", "::ffff:192.0.2.1"])
def test_addresses_that_others_reach_are_known(address: str) -> None:
    assert is_loopback(address) is False


# ---------------------------------------------------------------- clients that do not ask


@pytest.mark.parametrize("sent", [b"", HALF])
def test_a_client_that_never_sends_its_headers_is_dropped(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_HEADER_TIME_S", 0.05)
    with serving(KeepingService()) as url, connected(url) as client:
        client.sendall(sent)
        assert client.recv(100) == b""


def test_a_slow_answer_is_not_dropped_with_its_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_HEADER_TIME_S", 0.05)
    service = KeepingService()
    service.script = lambda _: [0.3, *say("late")]
    with serving(service) as url, connected(url) as client:
        client.sendall(question())
        told = b""
        while not told.endswith(b"}}"):
            told += client.recv(1000)
        assert b'"content":"late"' in told


def test_headers_without_end_are_refused() -> None:
    with serving(KeepingService()) as url, connected(url) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"x" * (40 << 10))
        assert client.recv(12) == b"HTTP/1.1 400"


@pytest.mark.parametrize("sent", [b"", HALF, HEALTH], ids=["nothing", "half a head", "all of a request"])
def test_where_there_are_too_many_connections_the_one_idle_for_longest_is_closed(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "N_CONNECTIONS_MAX", 3)
    with serving(KeepingService()) as url, ExitStack() as stack:
        clients = []
        for _ in range(3):
            clients.append(stack.enter_context(connected(url)))
            if sent == HEALTH:
                assert answer_of(clients[-1]) == b"HTTP/1.1 200 OK"
            else:
                clients[-1].sendall(sent)
        if sent == HEALTH:  # the first is not the one idle for longest any more
            assert answer_of(clients[0]) == b"HTTP/1.1 200 OK"
            clients.append(clients.pop(0))
        new = stack.enter_context(connected(url))
        assert answer_of(new) == b"HTTP/1.1 200 OK"
        assert is_dropped(clients[0])
        assert answer_of(clients[1], b"\r\n\r\n" if sent == HALF else HEALTH) == b"HTTP/1.1 200 OK"


def test_connections_in_use_are_not_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "N_CONNECTIONS_MAX", 2)
    service = KeepingService()
    service.script = lambda _: [AnswerPiece(index=0, text="slow"), FOREVER]
    with serving(service) as url, connected(url) as one, connected(url) as two:
        for client in (one, two):
            client.sendall(question(stream=True))
            assert client.recv(15) == b"HTTP/1.1 200 OK"
        with connected(url) as third:
            assert is_dropped(third)
        assert service.n_active == 2


class Stub:
    """A connection of a crowd."""

    def __init__(self, idle_since_s: float | None) -> None:
        self.is_idle = idle_since_s is not None
        self.idle_since_s = idle_since_s
        self.was_closed = False
        self.transport = SimpleNamespace(close=self._close)

    def _close(self) -> None:
        self.was_closed = True


def test_an_address_has_so_many_connections_and_others_theirs() -> None:
    crowd = Crowd(100, 2)
    busy = [Stub(None) for _ in range(2)]
    assert [crowd.enter(one, "192.0.2.1") for one in busy] == [True, True]
    assert crowd.enter(Stub(1.0), "192.0.2.1") is False
    assert crowd.enter(Stub(1.0), "::ffff:192.0.2.1") is False
    assert crowd.enter(Stub(1.0), "192.0.2.2") is True
    crowd.leave(busy[0])
    assert crowd.enter(Stub(1.0), "192.0.2.1") is True


def test_an_address_with_too_many_connections_loses_its_own_idle_ones_only() -> None:
    crowd = Crowd(100, 2)
    other, late, early = Stub(1.0), Stub(9.0), Stub(5.0)
    for one, address in ((other, "192.0.2.2"), (late, "192.0.2.1"), (early, "192.0.2.1")):
        assert crowd.enter(one, address) is True
    assert crowd.enter(Stub(10.0), "192.0.2.1") is True
    assert [one.was_closed for one in (other, late, early)] == [False, False, True]


def test_a_network_of_64_bits_counts_as_one_address() -> None:
    crowd = Crowd(100, 1)
    assert crowd.enter(Stub(None), "2001:db8::1") is True
    assert crowd.enter(Stub(None), "2001:db8::ffff:1%eth0") is False
    assert crowd.enter(Stub(None), "2001:db8:0:1::1") is True


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_users_of_this_machine_have_no_limit_for_one_address(address: str) -> None:
    crowd = Crowd(5, 1)
    assert [crowd.enter(Stub(None), address) for _ in range(6)] == [True] * 5 + [False]


# ---------------------------------------------------------------- clients that do not read


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_reads_nothing_is_dropped_and_its_answer_ended(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "_STALLED_S", 0.2)
    service = KeepingService()
    service.script = lambda _: [
        *(AnswerPiece(index=0, text="x" * 5000) for _ in range(200)),
        *[FOREVER] * is_stream,
        *say(""),
    ]
    with serving(service) as url, connected(url, n_buffer=4096) as client:
        client.sendall(question(stream=is_stream))
        end = time.monotonic() + PATIENCE_S
        while not (service.answers and service.answers[0].was_cancelled == is_stream and not service.n_active):
            assert time.monotonic() < end
            time.sleep(0.01)
        assert service.answers[0].n_said < 200 or not is_stream
        while not client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):  # it is reset: what waited is gone
            assert time.monotonic() < end
            time.sleep(0.01)


@pytest.mark.slow
def test_a_client_that_reads_slowly_is_not_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_module, "_STALLED_S", 2.0)
    service = KeepingService()
    service.script = lambda _: [*(AnswerPiece(index=0, text="x" * 5000) for _ in range(200)), *say("all")]
    with serving(service) as url, connected(url, n_buffer=4096) as client:
        client.sendall(question())
        began_s, told = time.monotonic(), b""
        while not told.endswith(b"}}"):
            time.sleep(max(0.0, 5.0 * len(told) / 1_000_000 - (time.monotonic() - began_s)))  # 5 s in all
            told += client.recv(10_000)
        assert told.count(b"x" * 5000) == 200


# ---------------------------------------------------------------- clients that say two things


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1\r\nContent-Length: 4\r\nTransfer-Encoding: chunked", b"HTTP/1.0\r\nTransfer-Encoding: chunked"],
    ids=["and a length", "in HTTP/1.0"],
)
def test_a_body_of_doubtful_length_is_refused_and_nothing_after_it_is_taken(head: bytes) -> None:
    with serving(KeepingService()) as url, connected(url) as client:
        client.sendall(b"POST /v1/completions " + head + b"\r\nHost: localhost\r\n\r\n0\r\n\r\n" + HEALTH)
        told = b""
        while piece := client.recv(1000):
            told += piece
        assert told.startswith(b"HTTP/1.1 400 ")
        assert (told.count(b"HTTP/1.1"), told.lower().count(b"connection: close")) == (1, 1)
