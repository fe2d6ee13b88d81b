"""Gateways as processes of their own, as `promptmill serve` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx

from jobs.settings import Settings, environment_of
from tests.conftest import wait_until


@contextmanager
def gateway_process(settings: Settings, more: Mapping[str, str] | None = None) -> Iterator[str]:
    """A gateway on a free port of loopback. Gives its URL, without /v1."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PROMPTMILL_")}
    environment |= environment_of(settings) | {"PROMPTMILL_GATEWAY_PORT": "0"} | dict(more or {})
    process = subprocess.Popen(
        [sys.executable, "-m", "jobs.cli", "serve"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=settings.home.parent,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        url = None
        for line in process.stderr:
            if "serving http://" in line:
                url = line.strip().rpartition("serving ")[2].removesuffix("/v1")
                break
        assert url is not None, f"the gateway ended with {process.wait()}"
        wait_until(lambda: httpx.get(f"{url}/healthz", trust_env=False).status_code == 200, what="the gateway's start")
        yield url
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
