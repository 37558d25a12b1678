"""What can be done with the conversations that are kept."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
from starlette.testclient import TestClient

from llamakv.errors import ExistsError, LockedError, MismatchError, NotFoundError, WriteError
from llamakv.server.contract import SessionLine
from tests.server.fake_service import COUNTS, LINE, FakeService

TOLD = {"object": "session", **asdict(LINE)}


def test_sessions_are_listed_as_they_are(client: TestClient) -> None:
    assert client.get("/v1/sessions").json() == {"object": "list", "data": [TOLD]}


@pytest.mark.parametrize(
    ("act", "body", "done"),
    [
        ("save", None, ("save", "notes", None, "")),
        ("save", {}, ("save", "notes", None, "")),
        ("save", {"as": "copy"}, ("save", "notes", "copy", "")),
        ("save", {"new_name": "copy"}, ("save", "notes", "copy", "")),
        ("resume", None, ("resume", "notes", "")),
        ("fork", {"as": "b"}, ("fork", "notes", "b", "", None)),
        ("fork", {"as": "b", "at": "turn2"}, ("fork", "notes", "b", "", "turn2")),
        ("fork", {"as": "b", "at": 120}, ("fork", "notes", "b", "", "120")),
        ("pin", {}, ("pin", "notes", "", True)),
        ("unpin", None, ("pin", "notes", "", False)),
    ],
)
def test_acts_reach_the_service_and_tell_the_session(client, service: FakeService, act, body, done) -> None:
    answer = client.post(f"/v1/sessions/notes/{act}", **({} if body is None else {"json": body}))
    assert (answer.status_code, answer.json()) == (200, TOLD)
    assert service.done == [done]


def test_a_session_is_deleted(client: TestClient, service: FakeService) -> None:
    answer = client.delete("/v1/sessions/notes")
    assert answer.json() == {"object": "session.deleted", "name": "notes", "deleted": True}
    assert service.done == [("delete", "notes", "")]


def test_inspecting_tells_all_and_infinities_as_text(client: TestClient) -> None:
    told = client.get("/v1/sessions/notes").json()
    assert (told["tokens"], told["sampling"]) == (40, {"logit_bias": [[3, "-inf"]]})


@pytest.mark.parametrize(
    ("act", "body", "param"),
    [("fork", {}, "as"), ("fork", {"as": 5}, "as"), ("fork", {"as": "b", "at": True}, "at"),
     ("fork", {"as": "b", "at": -1}, "at"), ("save", {"as": "a", "new_name": "b"}, "new_name"),
     ("save", {"force": True}, "force"), ("pin", {"as": "x"}, "as")],
)  # fmt: skip
def test_wrong_fields_are_refused_by_name(client, service: FakeService, act: str, body, param: str) -> None:
    answer = client.post(f"/v1/sessions/notes/{act}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert service.done == []


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotFoundError("x"), 404), (ExistsError("x"), 409), (LockedError("x"), 409), (MismatchError("x"), 409),
     (WriteError("x"), 500)],
)  # fmt: skip
def test_errors_have_their_status(client, service: FakeService, error: Exception, status: int) -> None:
    service.refuse_with = error
    assert client.post("/v1/sessions/notes/resume").status_code == status


def test_a_session_that_is_not_there_is_a_404_without_the_stores_place(client: TestClient) -> None:
    answer = client.get("/v1/sessions/b%20c")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "no session is called 'b c'")
    assert "home" not in answer.text


def test_what_the_page_shows_comes_in_one_answer(client: TestClient) -> None:
    told = client.get("/v1/live").json()
    assert (told["ready"], told["counts"], told["sessions"]) == (True, asdict(COUNTS), [TOLD])
    assert (told["n_sessions"], told["model"]["name"]) == (1, "tiny")


def test_the_page_is_told_of_the_conversations_used_last_and_how_many_there_are(
    client: TestClient, service: FakeService
) -> None:
    lines = [replace(LINE, name=f"talk-{n}") for n in range(1234)]

    async def sessions(space: str) -> list[SessionLine]:
        return lines

    service.sessions = sessions  # type: ignore[method-assign]
    told = client.get("/v1/live").json()
    assert [one["name"] for one in told["sessions"]] == [f"talk-{n}" for n in range(200)]
    assert told["n_sessions"] == 1234
    assert len(client.get("/v1/sessions").json()["data"]) == 1234
