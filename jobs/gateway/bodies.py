"""JSON bodies: read whole within the edge's bound, parsed and checked into a typed model, described for OpenAPI.

Through `jobs/protocol.py` rather than FastAPI's own body parameters, so that what is wrong is said in one wording.
"""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, BeforeValidator

from jobs import protocol


def _whole(value: object) -> object:
    """3.0 is a whole number in JSON, which knows one kind of number."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


# Behind the bounds of an `int` field: `Annotated[int, Field(ge=1), WHOLE]`.
WHOLE = BeforeValidator(_whole)
ModelT = TypeVar("ModelT", bound=BaseModel)


async def read_json(http_request: Request, model: type[ModelT]) -> ModelT:
    """Parse the body into `model`. Raises InvalidRequest naming field, value and way out."""
    return protocol.parse_as(model, await http_request.body())


def describe_body(model: type[BaseModel], *, is_required: bool = True) -> dict[str, Any]:
    """`openapi_extra` of a route that reads `model`."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}", mode="validation")
    definitions = schema.pop("$defs", {})
    return {
        "requestBody": {
            "required": is_required,
            "content": {"application/json": {"schema": _inlined(schema, definitions)}},
        }
    }


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """The schema with its references replaced by what they name: ours are small and not recursive."""
    if isinstance(schema, dict):
        reference = schema.get("$ref")
        if isinstance(reference, str):
            return _inlined(definitions[reference.rpartition("/")[2]], definitions)
        return {key: _inlined(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    return schema
