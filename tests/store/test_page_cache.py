"""What of a file is in memory, where the system tells."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamakv.store.page_cache import n_resident_bytes


def test_of_files_of_others_it_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    told = n_resident_bytes(path)
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    assert n_resident_bytes(path) == told  # it may be written to
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert n_resident_bytes(path) is None
