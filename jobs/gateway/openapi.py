"""The OpenAPI document: FastAPI's, with the errors that each route can answer in the form in which they come.

FastAPI would promise 422 answers of its own form, which nobody gets here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
# What any call may be answered with, whatever its route.
COMMON_ERRORS: Mapping[str, str] = {
    "400": "The call is not acceptable; `code` and `param` say what is wrong.",
    "401": "No API key, or one that is not known.",
    "403": "The key may not do this.",
    "404": "There is no such thing, or it is another tenant's.",
    "408": "The client fell silent in the midst of the call.",
    "413": "The body is too large.",
    "415": "The body is compressed, or not of the type that the route takes.",
    "429": "A quota is used up; Retry-After says when to come back.",
    "500": "The server failed.",
    "503": "The database, the queue or the workers are away or overloaded; Retry-After says when to come back.",
}
OPEN_ROUTES = ("/healthz", "/readyz", "/metrics")


def describe_api(app: FastAPI) -> None:
    """Let the application serve that document."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]  # as FastAPI's documentation says to do it


def _document(app: FastAPI) -> dict[str, Any]:
    found = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Error"] = dict(ERROR_SCHEMA)
    for path, operations in found["paths"].items():
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            for status, description in COMMON_ERRORS.items():
                if path in OPEN_ROUTES and status not in ("400", "413", "415", "500"):
                    continue
                responses.setdefault(
                    status,
                    {
                        "description": description,
                        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                    },
                )
    return found
