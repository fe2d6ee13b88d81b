"""Many rows in one statement, as each database likes it best: whole lists of ids, and inserts of hundreds of rows.

The statements have the same text whatever the number of rows, so that drivers and servers prepare them once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

from sqlalchemy import BigInteger, Boolean, Connection, Dialect, Table, bindparam, text
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.dialects.postgresql.base import PGDialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.expression import ColumnElement
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.types import Text, TypeDecorator, TypeEngine

from storage.direct import run_sqlite

# Rows of one INSERT on SQLite. More bring nothing; with our widest table it is a tenth of the parameters it allows.
SQLITE_BLOCK_ROWS = 128


class _Ids(TypeDecorator[list[int]]):
    """A list of ids as one parameter: an array on Postgres, JSON on SQLite."""

    impl = Text
    cache_ok = True

    def load_dialect_impl(self, dialect: Dialect) -> TypeEngine[Any]:
        return dialect.type_descriptor(Text() if dialect.name == "sqlite" else ARRAY(BigInteger))

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return json.dumps(list(value)) if dialect.name == "sqlite" else list(value)


class one_of(FunctionElement[bool]):  # noqa: N801  (read as the function that it is)
    """`column` is among the ids of the parameter called `name`."""

    inherit_cache = True
    type = Boolean()
    _is_implicitly_boolean = True  # or SQLAlchemy adds `= 1` for SQLite, which then reads the whole table

    def __init__(self, column: ColumnElement[Any], name: str) -> None:
        super().__init__(column, bindparam(name, type_=_Ids()))


@compiles(one_of, "sqlite")
def _one_of_sqlite(element: one_of, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} IN (SELECT value FROM json_each({ids}))"


@compiles(one_of, "postgresql")
def _one_of_postgres(element: one_of, compiler: SQLCompiler, **kw: Any) -> str:
    column, ids = (compiler.process(clause, **kw) for clause in element.clauses)
    return f"{column} = ANY ({ids})"


def insert_rows(
    connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]], *, unless: tuple[str, ...] = ()
) -> int:
    """Insert rows that all have the same columns. Returns how many were inserted.

    unless: columns of a unique constraint; a row that it would refuse is left out.
    """
    if not rows:
        return 0
    columns = tuple(rows[0])
    return insert_values(
        connection, table, columns, [tuple(row[name] for name in columns) for row in rows], unless=unless
    )


def insert_values(
    connection: Connection,
    table: Table,
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    *,
    unless: tuple[str, ...] = (),
) -> int:
    """As `insert_rows`, of rows that hold their values in the order of `columns`."""
    if connection.dialect.name == "sqlite":
        return sum(
            _insert_sqlite(connection, table, columns, rows[start : start + size], unless)
            for start, size in _blocks(len(rows))
        )
    payload = json.dumps([dict(zip(columns, row, strict=True)) for row in rows])
    if "\\u0000" in payload or "\\ud" in payload:  # escapes, or text that spells them: look closely
        payload = json.dumps([dict(zip(columns, map(_storable, row), strict=True)) for row in rows])
    return _inserted(connection.execute(_postgres_insert(table, columns, unless), {"rows": payload}))


def storable(text: str) -> str:
    """The text without what no database stores: NUL and lone surrogates become U+FFFD.

    Such characters arrive in what users send (JSON can spell them) and come back in messages that quote it.
    """
    if "\x00" in text:
        text = text.replace("\x00", "\ufffd")
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _storable(value: Any) -> Any:
    return storable(value) if isinstance(value, str) else value


def _inserted(result: Any) -> int:
    inserted: int = result.rowcount
    assert inserted >= 0, "the driver did not count"
    return inserted


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Cut rows into blocks (start, size) whose sizes are powers of two, so that there are few different statements."""
    start = 0
    while start < rows:
        size = 1 << (min(rows - start, SQLITE_BLOCK_ROWS).bit_length() - 1)
        yield start, size
        start += size


def _insert_sqlite(
    connection: Connection,
    table: Table,
    columns: tuple[str, ...],
    rows: Sequence[tuple[Any, ...]],
    unless: tuple[str, ...],
) -> int:
    """One step of SQLite for many rows: the driver gives up the interpreter's lock at each step, and gets it back late
    where other threads are busy."""
    statement = _sqlite_insert(table, columns, unless, len(rows))
    values = tuple(chain.from_iterable(rows))
    try:
        result = run_sqlite(connection, statement, values)
    except UnicodeEncodeError:
        result = run_sqlite(connection, statement, tuple(map(_storable, values)))
    return _inserted(result)


@lru_cache(maxsize=64)
def _sqlite_insert(table: Table, columns: tuple[str, ...], unless: tuple[str, ...], rows: int) -> str:
    values = f"({', '.join('?' * len(columns))})"
    return f"INSERT INTO {table.name} ({', '.join(columns)}) VALUES {', '.join([values] * rows)}{_conflict(unless)}"


@lru_cache(maxsize=64)
def _postgres_insert(table: Table, columns: tuple[str, ...], unless: tuple[str, ...]) -> Any:
    """All rows travel as one JSON text: far less work than a parameter for each value."""
    dialect = PGDialect()  # type: ignore[no-untyped-call]
    typed = ", ".join(f"{column} {table.c[column].type.compile(dialect)}" for column in columns)
    names = ", ".join(columns)
    return text(
        f"INSERT INTO {table.name} ({names}) SELECT {names} "
        f"FROM json_to_recordset(CAST(:rows AS json)) AS given({typed}){_conflict(unless)}"
    )


def _conflict(unless: tuple[str, ...]) -> str:
    return f" ON CONFLICT ({', '.join(unless)}) DO NOTHING" if unless else ""
