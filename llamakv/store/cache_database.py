"""The SQLite database of a store's cache: opened if it is sound, replaced if it is not, in memory where neither works.

The only home of ``sqlite3``. What the tables mean is ``cache``'s to know.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from llamakv.errors import StoreError
from llamakv.store import files
from llamakv.store.store_folder import is_store

FOLDER = ".cache"
_FILE = "sessions.sqlite"
_LOCK = ".lock"
_WAIT_S = 1.0
_VERSION = 2
_SCHEMA = (
    "CREATE TABLE folder (stamp BLOB NOT NULL)",
    "CREATE TABLE sessions (name BLOB PRIMARY KEY, stamp BLOB NOT NULL, facts BLOB NOT NULL, model BLOB NOT NULL,"
    " checksum INTEGER NOT NULL) WITHOUT ROWID",
    "CREATE TABLE objects (name BLOB PRIMARY KEY, origin BLOB NOT NULL, sections BLOB NOT NULL,"
    " checksum INTEGER NOT NULL)",
    "CREATE TABLE prefixes (name BLOB NOT NULL, space TEXT NOT NULL, is_point INTEGER NOT NULL, tokens BLOB NOT NULL)",
    "CREATE INDEX prefixes_by_name ON prefixes (name)",
    "CREATE INDEX prefixes_by_tokens ON prefixes (space, is_point, tokens)",
)
_PRIMARY = 0xFF  # of an extended error code
_HARMLESS = frozenset(  # errors that say nothing against the file
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    }
)

DatabaseError = sqlite3.Error
Row = tuple[Any, ...]
_Result = TypeVar("_Result")


class WrongRowError(sqlite3.DatabaseError):
    """A row that is not what was written; whoever finds one raises it."""


class CacheDatabase:
    """The database of the store at ``root``; one in memory where that is no store or none can be opened.

    Safe between processes, however they end; not to be shared by threads.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / FOLDER
        self._place: tuple[int, int] | None = None
        self._connection = self._open() if is_store(root) else _in_memory()

    @property
    def in_memory(self) -> bool:
        """Whether nothing will be left of it."""
        return self._place is None

    def close(self) -> None:
        """Close it; calling it again does nothing."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    # ---------------------------------------------------------------- work

    def attempt(self, work: Callable[[], _Result]) -> _Result:
        """Do something with the database, or again with one in memory, empty at first, if that fails. A file that is
        not what was written is removed."""
        try:
            return work()
        except sqlite3.Error as error:
            self.close()
            if not self.in_memory and _is_harm(error):
                with contextlib.suppress(StoreError), self._opening():
                    self._discard()
            self._place = None
            self._connection = _in_memory()
            return work()

    def rows(self, query: str, values: Iterable[object] = ()) -> list[Row]:
        """Return what a query finds. Raises: DatabaseError."""
        return self._connection.execute(query, tuple(values)).fetchall()

    def change(self, statement: str, rows: Iterable[Row]) -> int:
        """Execute a statement for each row of values; return how many rows of the database it changed.

        Raises: DatabaseError.
        """
        return self._connection.executemany(statement, rows).rowcount

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """Make what is changed inside appear at once, or not at all. Raises: DatabaseError."""
        with _transaction(self._connection):
            yield

    # ---------------------------------------------------------------- the file

    def _open(self) -> sqlite3.Connection:
        try:
            with self._opening():
                return self._open_file()
        except (StoreError, sqlite3.Error):
            self._place = None
            return _in_memory()

    @contextlib.contextmanager
    def _opening(self) -> Iterator[None]:
        """Nobody else opens the database or removes it meanwhile: its parts must not be those of two."""
        files.make_private_folder(self._folder)
        with files.lock_of(self._folder / _LOCK, shared=False, wait_s=_WAIT_S):
            yield

    def _open_file(self) -> sqlite3.Connection:
        path = self._folder / _FILE
        for is_last in (False, True):
            if not os.path.lexists(path):
                files.replace_small_file(path, b"")  # private from its first moment; SQLite's other files follow it
            self._place = _place_of(path)
            connection = _connect(path)
            try:
                if _is_ready(connection):
                    return connection
            except sqlite3.Error as error:
                if is_last or not _is_harm(error):
                    connection.close()
                    raise
            connection.close()
            self._discard()
        raise sqlite3.DatabaseError("no database can be made")

    def _discard(self) -> None:
        """Remove the file that was opened, if it is still there; others that have it open lose nothing."""
        path = self._folder / _FILE
        if self._place == _place_of(path):
            for ending in ("", "-wal", "-shm"):
                files.discard(path.with_name(_FILE + ending))


# ---------------------------------------------------------------- private


def _in_memory() -> sqlite3.Connection:
    connection = _connect(":memory:")
    _is_ready(connection)
    return connection


def _connect(path: Path | str) -> sqlite3.Connection:
    return sqlite3.connect(path, timeout=_WAIT_S, isolation_level=None)


def _is_ready(connection: sqlite3.Connection) -> bool:
    """Whether a database is one of this version; an empty one is made so. Raises: sqlite3.Error."""
    connection.execute("PRAGMA trusted_schema = OFF")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    found = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
    if version == 0 and not found:
        with _transaction(connection):
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {_VERSION}")
        return True
    return bool(version == _VERSION and found == set(_SCHEMA))


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _is_harm(error: sqlite3.Error) -> bool:
    """Whether an error says that the file is not what was written."""
    if isinstance(error, sqlite3.ProgrammingError | sqlite3.InterfaceError):
        return False
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return code is None or code & _PRIMARY not in _HARMLESS


def _place_of(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path, follow_symlinks=False)
    except OSError:
        return None
    return found.st_dev, found.st_ino
