"""Which model file it is, by what the file system says of it."""

from __future__ import annotations

from pathlib import Path

from llamakv.ops.matching import stamp_of


def test_a_model_in_parts_has_changed_when_any_of_them_has(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2))
    first.write_bytes(b"GGUF one")
    second.write_bytes(b"GGUF two")
    before = stamp_of(first)
    assert stamp_of(first) == before
    second.write_bytes(b"GGUF two and more")
    assert stamp_of(first) != before
