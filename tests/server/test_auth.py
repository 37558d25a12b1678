"""Who is let in."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from tests.server.fake_service import FakeService

KEYS = {"ada": "key-of-ada", "bob": "schlüssel"}


def bearer(key: str) -> dict[str, bytes]:
    return {"Authorization": b"Bearer " + key.encode()}


def ask(client: TestClient, headers: dict[str, bytes] | None = None):
    body = {"messages": [{"role": "user", "content": "hi"}]}
    return client.post("/v1/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("wrong"), bearer("key-of-ad"), bearer("key-of-ada2"), {"Authorization": b"key-of-ada"},
     {"Authorization": b"Basic key-of-ada"}, {"Authorization": b"Bearer \xff"}],
    ids=range(8),
)  # fmt: skip
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/metrics", "/v1/sessions", "/v1/live", "/none"]
)
def test_without_a_known_key_nothing_is_told(connect, service: FakeService, headers, path: str) -> None:
    answer = connect(keys=KEYS).request("POST" if "chat" in path else "GET", path, headers=headers)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (service.asks, service.done) == ([], [])


@pytest.mark.parametrize("key", KEYS.values())
def test_each_key_is_let_in(connect, key: str) -> None:
    assert ask(connect(keys=KEYS), bearer(key)).status_code == 200


def test_the_page_and_health_need_no_key(connect) -> None:
    client = connect(keys=KEYS)
    assert [client.get(path).status_code for path in ("/", "/app.js", "/style.css", "/health")] == [200] * 4


def test_keys_share_one_space_unless_they_are_isolated(connect, service: FakeService) -> None:
    for isolate in (False, True):
        client = connect(keys=KEYS, isolate=isolate)
        for key in (*KEYS.values(), "key-of-ada"):
            ask(client, bearer(key))
    spaces = [one.space for one in service.asks]
    assert spaces[:3] == ["", "", ""]
    assert spaces[3] == spaces[5] != spaces[4]
    assert all(space and not any(key in space for key in KEYS.values()) for space in spaces[3:])


def test_sessions_are_seen_in_the_keys_own_space(connect, service: FakeService) -> None:
    client = connect(keys=KEYS, isolate=True)
    for key in KEYS.values():
        client.get("/v1/sessions", headers=bearer(key))
        client.post("/v1/sessions/notes/pin", headers=bearer(key))
    spaces = [what[1] if what[0] == "sessions" else what[2] for what in service.done]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


def test_the_page_is_told_the_counts_of_the_keys_own_space(connect) -> None:
    counts = [
        connect(keys=KEYS, isolate=isolate)
        .get("/v1/live", headers=bearer("key-of-ada"))
        .json()["counts"]["n_generated"]
        for isolate in (False, True)
    ]
    assert counts == [77, 32]  # those of all, and the fake's for any space


@pytest.mark.parametrize(
    ("options", "statuses"),
    [({}, [200, 200]), ({"isolate": True}, [403, 403]), ({"isolate": True, "metrics_key": "bob"}, [403, 200]),
     ({"metrics_key": "ada"}, [200, 403])],
)  # fmt: skip
def test_metrics_are_told_to_whom_they_are_for(connect, options: dict[str, object], statuses: list[int]) -> None:
    client = connect(keys=KEYS, **options)
    answers = [client.get("/metrics", headers=bearer(key)) for key in KEYS.values()]
    assert [answer.status_code for answer in answers] == statuses
    for answer in answers:
        assert answer.status_code == 200 or answer.json()["error"]["code"] == "metrics_not_allowed"


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "", "127.0.0.1.nip.io"]
)
def test_a_host_name_that_is_not_the_servers_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        assert client.get(path, headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1234", "127.0.0.1:8080", "[::1]:8080", "[::1]"])
def test_the_servers_own_host_names_are_taken(client: TestClient, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


def test_any_host_is_taken_where_none_is_told(connect) -> None:
    assert connect(allowed_hosts=()).get("/v1/models", headers={"Host": "llm.example"}).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://localhost:8080", 200), ("http://LOCALHOST:8080", 200), ("http://localhost:9090", 403),
     ("https://evil.example", 403), ("null", 403), ("", 403), ("http://localhost:99999999", 403)],
)  # fmt: skip
def test_only_the_servers_own_page_may_ask(client: TestClient, service: FakeService, origin: str, status: int) -> None:
    assert ask(client, {"Origin": origin.encode()}).status_code == status
    assert len(service.asks) == (status == 200)


def test_other_sites_are_given_no_leave_to_read(client: TestClient) -> None:
    site = {"Origin": "https://evil.example"}
    told = client.options("/v1/chat/completions", headers={**site, "Access-Control-Request-Method": "POST"})
    assert told.status_code == 403
    for answer in (told, client.get("/v1/models", headers=site)):
        assert not [name for name in answer.headers if name.startswith("access-control")]
