"""`/v1/models`: models that have workers or lately had, and models whose artifact lies in the home."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from jobs.gateway.identity import KnownCaller
from jobs.gateway.schemas import ModelList, ModelObject
from jobs.gateway.standing import ModelStanding, Standing
from jobs.protocol import unknown_model

router = APIRouter(prefix="/v1/models", tags=["models"])


def _standing_of(http_request: Request) -> Standing:
    standing: Standing = http_request.app.state.standing
    return standing


TheStanding = Annotated[Standing, Depends(_standing_of)]


@router.get("", summary="List models", response_model=ModelList)
async def list_models(standing: TheStanding, _caller: KnownCaller) -> dict[str, Any]:
    """All of them on one page."""
    models = await standing.models()
    return {"object": "list", "data": [_render(models[name]) for name in sorted(models)]}


# Model names may have slashes, as those of Hugging Face do.
@router.get("/{model:path}", summary="Describe a model", response_model=ModelObject)
async def retrieve_model(model: str, standing: TheStanding, _caller: KnownCaller) -> dict[str, Any]:
    models = await standing.models()
    if model not in models:
        raise unknown_model(model, models)
    return _render(models[model])


def _render(model: ModelStanding) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.created_at),
        "owned_by": "promptmill",
        "workers": model.workers,
    }
