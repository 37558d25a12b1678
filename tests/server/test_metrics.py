"""What monitoring reads."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from llamakv.errors import BusyError
from tests.server.fake_service import FakeService

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def read(client: TestClient) -> dict[tuple[str, tuple[str, ...]], float]:
    """Values by name and labels' values."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(one.name, tuple(one.labels.values())): one.value for family in families for one in family.samples}


def test_the_services_counts_are_told_as_they_are(client: TestClient) -> None:
    told = read(client)
    expected = {
        "hit_ratio": 0.75, "cells_used": 100, "cells_free": 300, "cells_pinned": 10, "sequences_live": 3,
        "requests_waiting": 2,
        "requests_active": 1, "evaluated_tokens_total": 250, "generated_tokens_total": 77, "answers_sent_back_total": 2,
        "prompt_tokens_total": 1000,
        "saves_total": 5, "save_failures_total": 1, "sequences_dropped_total": 4, "ready": 1, "sequences_max": 8,
    }  # fmt: skip
    assert {name: told[f"llamakv_{name}", ()] for name in expected} == expected
    assert told["llamakv_reused_tokens_total", ("memory",)] == 600
    assert told["llamakv_reused_tokens_total", ("store",)] == 150


def test_requests_are_counted_by_route_and_status(client: TestClient, service: FakeService) -> None:
    for _ in range(2):
        client.post("/v1/chat/completions", json=CHAT)
    client.post("/v1/chat/completions", json={**CHAT, "n": 0})
    service.refuse_with = BusyError("full")
    client.post("/v1/completions", json={"prompt": "x", "stream": True})
    service.refuse_with = RuntimeError("boom")
    client.post("/v1/completions", json={"prompt": "x"})
    client.get("/v1/sessions/secret")
    client.post("/v1/sessions/secret/save")
    client.get("/what/ever")
    client.get("/health", headers={"Host": "evil.example"})
    told = {labels: n for (name, labels), n in read(client).items() if name == "llamakv_http_requests_total"}
    assert told == {
        ("/v1/chat/completions", "200"): 2, ("/v1/chat/completions", "400"): 1, ("/v1/completions", "429"): 1,
        ("/v1/completions", "500"): 1, ("/v1/sessions/{name}", "500"): 1, ("/v1/sessions/{name}/save", "500"): 1,
        ("other", "404"): 1, ("/health", "403"): 1,
    }  # fmt: skip


def test_times_are_counted_once_for_each_request_for_text(client: TestClient) -> None:
    for is_stream in (False, True):
        client.post("/v1/chat/completions", json={**CHAT, "stream": is_stream})
    client.post("/v1/chat/completions", content=b"{")  # nothing was asked
    told = read(client)
    assert told["llamakv_request_seconds_count", ()] == 2
    assert told["llamakv_first_token_seconds_count", ()] == 2
    assert told["llamakv_tokens_per_second_count", ()] == 2
    assert told["llamakv_queue_seconds_count", ()] == 2
    assert told["llamakv_queue_seconds_sum", ()] == 2 * 1.23456
    assert (told["llamakv_queue_seconds_bucket", ("1.0",)], told["llamakv_queue_seconds_bucket", ("2.5",)]) == (0, 2)


def test_a_request_that_was_not_queued_is_no_time_in_the_queue(client: TestClient, service: FakeService) -> None:
    service.refuse_with = BusyError("full")
    client.post("/v1/chat/completions", json=CHAT)
    assert read(client)["llamakv_queue_seconds_count", ()] == 0


def test_applications_count_apart(connect) -> None:
    first, second = connect(), connect()
    first.post("/v1/chat/completions", json=CHAT)
    assert read(second)["llamakv_request_seconds_count", ()] == 0
