"""A fake service, and clients of the application over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from starlette.testclient import TestClient

from llamakv.server.app import make_app
from llamakv.server.limits import ServeOptions
from tests.server.fake_service import FakeService


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def connect(service: FakeService) -> Callable[..., TestClient]:
    """A client of an application with these options; what breaks inside is seen as its status."""

    def connect(**options: object) -> TestClient:
        app = make_app(service, ServeOptions(**options))
        return TestClient(app, base_url="http://localhost:8080", raise_server_exceptions=False)

    return connect


@pytest.fixture
def client(connect: Callable[..., TestClient]) -> TestClient:
    return connect()
