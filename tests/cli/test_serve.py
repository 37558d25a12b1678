"""``llamakv serve``: what its options become, what it says, and how it ends; over a service without an engine."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import IO

import pytest

from llamakv.server import run as run_module
from llamakv.server.limits import ServeOptions
from llamakv.server.run import Ready, Served, ServeRequest
from tests.cli.conftest import Ran
from tests.conftest import TinyModels
from tests.server.fake_service import COUNTS, MODEL
from tests.server.keeping_service import KeepingService

PATIENCE_S = 60.0
PROGRAM = """
import sys, types
from tests.server.fake_service import FOREVER
from tests.server.keeping_service import KeepingService
from llamakv.server.contract import AnswerPiece

def open_service(request, reporter):
    service = KeepingService()
    service.script = lambda ask: [AnswerPiece(index=0, text="slow"), FOREVER]
    return service

sys.modules["llamakv.server.service"] = module = types.ModuleType("service")
module.open_service = open_service
from llamakv.cli import app
from llamakv.cli.commands import serve as serve_command
app.main()
"""
ROOT = Path(run_module.__file__).parents[2]


class Asked:
    """What ``serve`` asked for, in place of a server."""

    def __init__(self) -> None:
        self.request: ServeRequest | None = None
        self.options: ServeOptions | None = None
        self.where: tuple[str, int, float] | None = None
        self.counts = replace(COUNTS, n_save_failures=0)
        self.settings: dict[str, object] = {}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    found = Asked()
    module = ModuleType("llamakv.server.service")

    def open_service(request: ServeRequest, _: object) -> KeepingService:
        found.request = request
        return KeepingService()

    def run_server(
        make: Callable[[], object], options: ServeOptions, *, host: str, port: int, grace_s: float,
        on_ready: Callable[[Ready], None], **_: object,
    ) -> Served:  # fmt: skip
        make()
        found.options, found.where = options, (host, port, grace_s)
        model = replace(MODEL, settings=found.settings)
        on_ready(Ready(url="http://127.0.0.1:8080", host=host, port=8080, model=model, counts=found.counts))
        return Served(model=model, counts=found.counts, elapsed_s=12.0, was_hurried=False)

    module.open_service = open_service  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llamakv.server.service", module)
    monkeypatch.setattr(run_module, "run_server", run_server)
    return found


# ---------------------------------------------------------------- options


def test_without_options_it_serves_this_machine_only(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    ran = run("serve")
    assert (ran.status, ran.out) == (0, "")
    assert asked.where == ("127.0.0.1", 8080, 10.0)
    assert asked.options == ServeOptions()
    request = asked.request
    assert request is not None
    assert (request.model_path, request.model_bytes) == (model, model.stat().st_size)
    assert request.store == Path(os.environ["LLAMAKV_STORE"])
    assert (request.n_ctx, request.n_cells, request.n_sequences, request.n_waiting_max) == (None, None, None, 64)
    assert (request.prefix_share, request.warm, request.max_bytes, request.ttl_s) == (0.5, (), None, None)


def test_options_are_passed_on(asked: Asked, run: Callable[..., Ran], model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.txt"
    keys.write_text("# ours\nann 0123456789abcdef0\n\nfedcba98765432100\n")
    keys.chmod(0o600)
    ran = run(
        "serve", "-m", model, "--host", "::1", "--port", "0", "--api-key-file", keys, "--isolate", "--alias", "gpt",
        "--metrics-key", "ann",
        "--grace", "2.5", "--parallel", "4", "-c", "512", "--cells", "2048", "--prefix-share", "0.25",
        "--max-queue", "0", "--max-connections", "7", "--max-time", "2m", "--max-body", "1MiB", "--max-tokens", "99",
        "--store", tmp_path / "other", "--max-bytes", "1GB", "--ttl", "7d",
        "--type-k", "q8_0", "--flash-attn", "on", "-t", "1",
    )  # fmt: skip
    assert (ran.status, ran.err.count("warning")) == (0, 0)
    assert asked.where == ("::1", 0, 2.5)
    options = asked.options
    assert options is not None
    assert options.keys == {"ann": "0123456789abcdef0", "key 2": "fedcba98765432100"}
    assert (options.isolate, options.metrics_key, options.model_alias) == (True, "ann", ("gpt",))
    assert options.max_time_s == 120.0
    assert (options.max_body_bytes, options.max_tokens, options.max_connections_per_address) == (1 << 20, 99, 7)
    request = asked.request
    assert request is not None
    assert (request.n_ctx, request.n_cells, request.n_sequences, request.n_waiting_max) == (512, 2048, 4, 0)
    assert (request.prefix_share, request.warm, request.store) == (0.25, (), tmp_path / "other")
    assert (request.max_bytes, request.ttl_s, request.n_threads, request.isolate) == (10**9, 7 * 86400.0, 1, True)
    assert (request.memory.type_k, request.memory.type_v, request.memory.flash_attn) == ("q8_0", "f16", True)


def test_sessions_are_warmed(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    assert run("serve", "-m", model, "--warm", "rules", "--warm", "more").status == 0
    assert asked.request is not None
    assert asked.request.warm == ("rules", "more")


def test_keys_may_come_from_the_environment(
    asked: Asked, run: Callable[..., Ran], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAKV_API_KEYS", "ann 0123456789abcdef0, fedcba98765432100")
    assert run("serve").status == 0
    assert asked.options is not None
    assert asked.options.keys == {"ann": "0123456789abcdef0", "key 2": "fedcba98765432100"}


def test_nothing_is_stored_without_a_store(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    assert run("serve", "--no-store").status == 0
    assert asked.request is not None
    assert asked.request.store is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--no-store", "--store", "x"), "--store needs a store, and --no-store means none"),
        (("--no-store", "--warm", "x"), "--warm needs a store, and --no-store means none"),
        (("--isolate", "--warm", "x"), "--warm has sessions in memory that are nobody's own"),
        (("--isolate",), "--isolate keeps API keys apart, and there are none"),
        (("--metrics-key", "ann"), "no API key is called 'ann', there are: none"),
        (("--port", "65536"), "65536 is more than 65535"),
        (("--parallel", "0"), "0 is less than 1"),
        (("--prefix-share", "1.5"), "1.5 is more than 1"),
        (("--max-body", "none"), "'none' is not a size"),
        (("--max-time", "soon"), "'soon' is not a time"),
        (("--max-tokens", "0"), "it must be at least 1, or -1 for no limit"),
    ],
)
def test_wrong_options_are_refused(
    options: tuple[str, ...], message: str, run: Callable[..., Ran], model: Path
) -> None:
    ran = run("serve", *options)
    assert ran.status == 2
    assert message in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no key"),
        ("one two three\n", "line 1 of keys.txt is neither a key nor a name and a key"),
        ("# x\nkéy-0123456789abcdef\n", "line 2 of keys.txt is neither a key nor a name and a key"),
        (
            "ann 0123456789abcdef\nann fedcba9876543210\n",
            "line 2 of keys.txt has a name or a key that was there before",
        ),
        ("0123456789abcdef\n0123456789abcdef\n", "line 2 of keys.txt has a name or a key that was there before"),
    ],
)
def test_a_wrong_key_file_is_refused(text: str, message: str, run: Callable[..., Ran], home: Path) -> None:
    Path("keys.txt").write_text(text)
    ran = run("serve", "--api-key-file", "keys.txt")
    assert (ran.status, message in ran.err) == (2, True)
    assert "0123456789abcdef" not in ran.err


def test_keys_that_can_be_read_or_guessed_are_warned_of(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    Path("keys.txt").write_text("short\n")
    Path("keys.txt").chmod(0o644)
    ran = run("serve", "--api-key-file", "keys.txt", "-q")
    assert ran.err.splitlines() == [
        "warning: other users of this machine can read keys.txt: chmod 600 keys.txt",
        "warning: line 1 of keys.txt: a key of 5 characters may be guessed",
    ]


# ---------------------------------------------------------------- what it says


def test_it_says_when_it_is_ready_and_what_was_done(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    assert run("serve").err.splitlines() == [
        "serving tiny on http://127.0.0.1:8080 · room for 400 tokens in memory, of 8 conversations at most",
        "stopped · 750 of 1,000 prompt tokens reused (75 %) · 77 generated · 5 saves",
    ]


def test_saves_that_failed_are_told_in_the_exit_status(asked: Asked, run: Callable[..., Ran], model: Path) -> None:
    asked.counts = replace(COUNTS, n_save_failures=3)
    ran = run("serve")
    assert ran.status == 3
    assert "warning: 3 saves failed" in ran.err.splitlines()


@pytest.mark.parametrize("kind", ["recurrent", "hybrid"])
def test_a_model_that_shares_at_some_places_only_is_warned_of(
    kind: str, asked: Asked, run: Callable[..., Ran], model: Path
) -> None:
    asked.settings = {"memory_kind": kind}
    assert f"warning: tiny is {kind}: others can begin only where its conversations" in run("serve", "-q").err


def test_json_has_a_line_when_it_is_ready_and_closes_with_the_counts(
    asked: Asked, run: Callable[..., Ran], model: Path
) -> None:
    ready, done = run("serve", "--json").lines
    assert (ready["type"], ready["url"], ready["port"]) == ("ready", "http://127.0.0.1:8080", 8080)
    assert (ready["cells"], ready["sequences"], ready["context"], ready["pid"]) == (400, 8, 512, os.getpid())
    assert (done["type"], done["command"], done["data"]["counts"]["n_reused_memory"]) == ("done", "serve", 600)
    assert done["data"]["elapsed_s"] == 12.0


def test_a_missing_model_is_not_found(asked: Asked, run: Callable[..., Ran], home: Path) -> None:
    ran = run("serve", "-m", "missing.gguf", "--json")
    assert (ran.status, ran.document["errors"][0]["code"]) == (10, "not_found")


# ---------------------------------------------------------------- as a process


class Server:
    """``llamakv serve`` as a process, over a service that never finishes an answer."""

    def __init__(self, *arguments: str | Path) -> None:
        command = [sys.executable, "-c", PROGRAM, "serve", *map(str, arguments), "--port", "0", "--json"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        self.err: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True).start()
        assert self.process.stdout is not None
        self.ready = json.loads(self.process.stdout.readline())

    def _read(self, stream: IO[str]) -> None:
        for text in stream:
            self.err.put(text.rstrip("\n"))

    def ask(self) -> None:
        """A request that is answered until the server stops."""
        body = b'{"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}'
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.ready['url']}/v1/chat/completions", body, headers)

        def work() -> None:
            with suppress(OSError):
                urllib.request.urlopen(request, timeout=PATIENCE_S).read()

        threading.Thread(target=work, daemon=True).start()
        until = time.monotonic() + PATIENCE_S
        while self.live()["counts"]["n_active"] == 0:
            assert time.monotonic() < until

    def live(self) -> dict[str, dict[str, int]]:
        with urllib.request.urlopen(f"{self.ready['url']}/v1/live", timeout=PATIENCE_S) as answer:
            found: dict[str, dict[str, int]] = json.load(answer)
            return found

    def end(self) -> tuple[int, dict[str, object]]:
        """The exit status and the closing document."""
        assert self.process.stdout is not None
        document = json.loads(self.process.stdout.read())
        return self.process.wait(PATIENCE_S), document


@contextmanager
def started(*arguments: str | Path) -> Iterator[Server]:
    server = Server(*arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_it_and_that_is_no_failure(number: int, model: Path) -> None:
    with started() as server:
        server.process.send_signal(number)
        status, document = server.end()
    assert (status, document["status"], document["errors"]) == (0, "ok", [])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_cuts_answers_short(number: int, status: int, model: Path) -> None:
    with started("--grace", "86400") as server:
        server.ask()
        server.process.send_signal(number)
        assert server.err.get(timeout=PATIENCE_S).startswith("stopping: ")
        server.process.send_signal(number)
        left, document = server.end()
    assert (left, document["status"]) == (status, "partial")
    assert document["errors"][0]["code"] == "interrupted"  # type: ignore[index]


def test_an_answer_that_goes_on_too_long_is_ended_and_that_is_no_failure(model: Path) -> None:
    with started("--grace", "0.1") as server:
        server.ask()
        server.process.send_signal(signal.SIGTERM)
        status, document = server.end()
    assert (status, document["status"]) == (0, "ok")


def test_the_port_of_another_program_is_refused(process: Callable[..., Ran], models: TinyModels) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, "serve", "-m", str(models.M), "--port", str(port)],
            capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    assert done.returncode == 12
    assert done.stderr.splitlines() == [
        f"error: port {port} of 127.0.0.1 is in use by another program",
        "hint: --port 0 takes a free one",
    ]


def test_other_machines_are_not_served_without_keys_and_no_model_is_looked_for(home: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", "-m", "missing.gguf", "--host", "0.0.0.0", "--port", "0"],
        capture_output=True, text=True, timeout=PATIENCE_S, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: 0.0.0.0 is open to other machines, and there are no API keys",
        "hint: (umask 077; head -c 24 /dev/urandom | base64 > keys.txt) && "
        "llamakv serve --host 0.0.0.0 --api-key-file keys.txt",
    ]


def test_without_its_libraries_it_says_what_to_install(
    run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamakv.cli.commands.serve.LIBRARIES", ("starlette", "no_such_library"))
    ran = run("serve")
    assert ran.status == 2
    assert ran.err.splitlines() == [
        "error: serving needs no_such_library, which is not installed",
        'hint: pip install "llamakv[serve]"',
    ]
