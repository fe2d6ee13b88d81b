"""Statements of which every request needs a few, run on SQLite by its driver without a detour.

SQLAlchemy takes about five times as long to hand a statement to SQLite, and its rows back, as SQLite takes to run it.
On Postgres, where a round trip is most of the cost, they go SQLAlchemy's way. Errors of the driver leave a transaction
as any other (`Database`).
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sqlalchemy import Connection, Select
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.sql.dml import Delete, Insert, Update

Statement = Select[Any] | Insert | Update | Delete


def run(connection: Connection, statement: Statement, values: Mapping[str, Any]) -> Sequence[Any]:
    """Run a statement that is built once and kept. Returns its rows, with columns as attributes; none, if it has none.

    values: by the names of the statement's parameters. Columns come as the driver gives them: on SQLite a boolean is an
    integer.
    """
    if connection.dialect.name != "sqlite":
        result = connection.execute(statement, values)
        return result.all() if result.returns_rows else ()
    prepared = _prepared(statement)
    given = {**prepared.constants, **values}
    parameters = [process(given[name]) if process else given[name] for name, process in prepared.parameters]
    rows = run_sqlite(connection, prepared.text, parameters).fetchall()
    return [prepared.make_row(row) for row in rows]


def run_sqlite(connection: Connection, text: str, parameters: Sequence[Any] = ()) -> Any:
    """Run SQL with `?` for parameters on SQLite. Returns the driver's cursor. Raises sqlite3.Error."""
    driver: Any = connection.connection.dbapi_connection
    return driver.execute(text, parameters)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A statement as SQLite takes it.

    parameters: in their order, each with what makes the form that the driver is given; None: it stays as it is.
    constants: values of those that the statement has itself.
    """

    text: str
    parameters: Sequence[tuple[str, Callable[[Any], Any] | None]]
    constants: Mapping[str, Any]
    make_row: Callable[[Sequence[Any]], Any]


@lru_cache(maxsize=256)
def _prepared(statement: Statement) -> _Prepared:
    dialect = SQLiteDialect(paramstyle="qmark")
    compiled = statement.compile(dialect=dialect)
    parameters = [(name, compiled.binds[name]) for name in compiled.positiontup or ()]
    returned = statement.selected_columns if isinstance(statement, Select) else statement.exported_columns
    row: Any = namedtuple("Row", [column.key for column in returned])  # type: ignore[misc]
    return _Prepared(
        text=str(compiled),
        parameters=[(name, each.type.dialect_impl(dialect).bind_processor(dialect)) for name, each in parameters],
        constants={name: each.value for name, each in parameters if not each.required},
        make_row=row._make,
    )
