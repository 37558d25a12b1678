"""Running the server: who can reach it, and what happens when it is stopped."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from starlette.testclient import TestClient

from llamakv.errors import EngineError, UsageError, WriteError
from llamakv.server.app import make_app
from llamakv.server.contract import AnswerPiece
from llamakv.server.limits import ServeOptions
from llamakv.server.run import AddressInUseError, Ready, Served, run_server
from tests.server.fake_service import FOREVER, say
from tests.server.keeping_service import KeepingService, serving

PATIENCE_S = 30.0


def never() -> KeepingService:
    raise AssertionError("the service was made")


def serve(make: Callable[[], KeepingService], host: str, port: int = 0, **options: object) -> Served:
    """A server that is to stop at once."""
    return run_server(
        make, ServeOptions(**options), host=host, port=port, grace_s=0.0, should_stop=lambda: 1,  # type: ignore[arg-type]
        on_ready=lambda ready: None, on_error=pytest.fail,
    )  # fmt: skip


@dataclass
class Running:
    """A server in a thread; ``n_stops`` is how often it was told to stop."""

    url: str = ""
    n_stops: int = 0
    served: Served | None = None
    failed: BaseException | None = None
    errors: list[str] = field(default_factory=list)
    thread: threading.Thread | None = None

    def end(self) -> None:
        assert self.thread is not None
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@contextmanager
def running(service: KeepingService, grace_s: float) -> Iterator[Running]:
    state = Running()
    is_ready = threading.Event()

    def on_ready(ready: Ready) -> None:
        state.url = ready.url
        is_ready.set()

    def work() -> None:
        try:
            state.served = run_server(
                lambda: service, ServeOptions(), host="127.0.0.1", port=0, grace_s=grace_s,
                should_stop=lambda: state.n_stops, on_ready=on_ready, on_error=state.errors.append,
            )  # fmt: skip
        except BaseException as error:
            state.failed = error
        finally:
            is_ready.set()

    state.thread = threading.Thread(target=work)
    state.thread.start()
    assert is_ready.wait(PATIENCE_S)
    try:
        yield state
    finally:
        state.n_stops += 2
        state.end()


def ask(url: str, into: list[object]) -> threading.Thread:
    """Ask for an answer, in a thread; notes its text and how it ended, or the status."""

    def work() -> None:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "session": "talk"}
        data = json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", data, headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                choice = json.load(answer)["choices"][0]
                into.append((choice["message"]["content"], choice["finish_reason"]))
        except urllib.error.HTTPError as error:
            into.append(error.code)

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def until(is_so: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---------------------------------------------------------------- the address


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_nothing_is_served_to_other_machines(host: str) -> None:
    with pytest.raises(UsageError, match="open to other machines, and there are no API keys") as caught:
        serve(never, host)
    assert f"--host {host} --api-key-file keys.txt" in str(caught.value.hint)


def test_with_keys_other_machines_are_served() -> None:
    assert serve(KeepingService, "0.0.0.0", keys={"ann": "k" * 20}).was_hurried is False


def test_a_taken_port_is_told_before_the_service_is_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(AddressInUseError, match=f"port {port} of 127.0.0.1 is in use") as caught:
            serve(never, "127.0.0.1", port)
    assert (caught.value.exit_status, caught.value.code) == (12, "address_in_use")


def test_a_port_that_was_taken_while_the_model_was_loaded_is_told_and_the_service_stopped() -> None:
    service = KeepingService()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    others: list[socket.socket] = []

    def make() -> KeepingService:
        others.append(socket.create_server(("127.0.0.1", port)))
        return service

    with pytest.raises(AddressInUseError):
        serve(make, "127.0.0.1", port)
    others[0].close()
    assert service.stops == [0.0]


def test_a_host_that_is_not_known_is_a_wrong_option() -> None:
    with pytest.raises(UsageError, match=r"the host 'no\.such\.host\.invalid' has no address"):
        serve(never, "no.such.host.invalid")
    with pytest.raises(UsageError, match=r"192\.0\.2\.1 port 8080 cannot be had"):
        serve(never, "192.0.2.1", 8080, keys={"ann": "k" * 20})


def test_the_address_is_free_again_when_the_service_cannot_be_made() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def fail() -> KeepingService:
        raise WriteError("no")

    with pytest.raises(WriteError):
        serve(fail, "127.0.0.1", port)
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize(("host", "status"), [("localhost", 200), ("127.0.0.1", 200), ("evil.example", 403)])
def test_a_local_server_answers_to_its_own_names_only(host: str, status: int) -> None:
    with serving(KeepingService()) as url:
        port = urlsplit(url).port
        request = urllib.request.Request(f"{url}/v1/live", headers={"Host": f"{host}:{port}"})
        try:
            answered = urllib.request.urlopen(request, timeout=PATIENCE_S).status
        except urllib.error.HTTPError as error:
            answered = error.code
    assert answered == status


# ---------------------------------------------------------------- stopping


def test_a_stop_lets_answers_end_and_refuses_new_requests_until_then() -> None:
    service = KeepingService()
    go_on = asyncio.Event()
    service.script = lambda _: [AnswerPiece(index=0, text="slow"), go_on, *say(" but sure")]
    told: list[object] = []
    late: list[object] = []
    with running(service, grace_s=FOREVER) as server:
        answer = ask(server.url, told)
        until(lambda: service.n_active)
        server.n_stops = 1
        until(lambda: not service.is_ready)
        ask(server.url, late).join()
        assert (late, told) == ([503], [])
        go_on._loop.call_soon_threadsafe(go_on.set)  # type: ignore[attr-defined]
        answer.join()
        server.end()
        assert told == [("slow but sure", "stop")]
        assert server.served is not None
        assert (server.served.was_hurried, service.stops, server.errors) == (False, [FOREVER], [])


def test_a_second_stop_does_not_wait() -> None:
    service = KeepingService()
    service.script = lambda _: [AnswerPiece(index=0, text="slow"), FOREVER]
    told: list[object] = []
    with running(service, grace_s=FOREVER) as server:
        answer = ask(server.url, told)
        until(lambda: service.n_active)
        server.n_stops = 1
        until(lambda: not service.is_ready)
        server.n_stops = 2
        until(lambda: len(service.stops) == 2)
        server.end()
        answer.join()
        assert told == [("slow", "length")]  # OpenAI's word for an answer that was cut off
        assert server.served is not None
        assert (server.served.was_hurried, service.stops) == (True, [FOREVER, 0.0])


def test_what_could_not_be_saved_is_raised() -> None:
    class Full(KeepingService):
        async def stop(self, timeout_s: float) -> None:
            raise WriteError("no space left on device")

    with running(Full(), grace_s=1.0) as server:
        server.n_stops = 1
        server.end()
        assert isinstance(server.failed, WriteError)


def test_a_fault_inside_is_told_and_the_server_goes_on() -> None:
    service = KeepingService()
    service.refuse_with = ZeroDivisionError("a bug")
    told: list[object] = []
    with running(service, grace_s=1.0) as server:
        ask(server.url, told).join()
        service.refuse_with = None
        ask(server.url, told).join()
        assert told == [500, ("Good day.", "stop")]
        assert server.errors == ["Exception in ASGI application: ZeroDivisionError: a bug"]


def test_logging_is_left_as_it_was() -> None:
    loggers = [logging.getLogger(name) for name in ("uvicorn.error", "uvicorn.access")]
    before = [(one.level, one.propagate, list(one.handlers)) for one in loggers]
    serve(KeepingService, "127.0.0.1")
    assert [(one.level, one.propagate, list(one.handlers)) for one in loggers] == before


def test_a_server_whose_engine_failed_ends_by_itself_with_that_error() -> None:
    service = KeepingService()
    with running(service, grace_s=FOREVER) as server:
        service.failure = EngineError("the engine failed: status -3")
        server.end()
        assert server.failed is service.failure
        assert (server.n_stops, service.stops[0]) == (0, FOREVER)


def test_while_it_ends_clients_are_told_that_the_engine_failed() -> None:
    service = KeepingService()
    service.failure = EngineError("the engine failed: status -3")
    with TestClient(make_app(service, ServeOptions()), base_url="http://localhost") as client:
        health, answer = client.get("/health"), client.post("/v1/chat/completions", json={"messages": []})
    assert (health.status_code, health.json()) == (503, {"status": "failed"})
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the engine failed, and the server ends")
