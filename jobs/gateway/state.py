"""What the routes work with: opened when the application starts, handed to each route as `TheGateway`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from celery import Celery
from fastapi import Depends, Request

from jobs.settings import Settings
from storage.database import Database


@dataclass(frozen=True, slots=True)
class Gateway:
    """settings: with the queue's URL filled in. files_dir: where contents of files lie."""

    settings: Settings
    database: Database
    celery: Celery
    files_dir: Path


async def gateway_of(http_request: Request) -> Gateway:
    """A coroutine, as FastAPI calls a plain function in a thread."""
    gateway: Gateway = http_request.app.state.gateway
    return gateway


TheGateway = Annotated[Gateway, Depends(gateway_of)]
