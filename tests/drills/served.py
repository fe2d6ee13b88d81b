"""A mill with a gateway: `promptmill serve` on a port that it keeps, so that one that died comes back where it was."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Mapping

import httpx

from jobs.keys import make_key
from tests.drills.mill import Mill


class ServedMill:
    """settings: of the gateway alone, without their prefix."""

    def __init__(self, mill: Mill, settings: Mapping[str, str] | None = None) -> None:
        self.mill = mill
        self._port = _free_port()
        self._settings = {"GATEWAY_PORT": str(self._port), **(settings or {})}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def url(self) -> str:
        """As the SDK's base_url."""
        return f"{self.root}/v1"

    def key(self, tenant: str = "default") -> str:
        return make_key(self.mill.database, tenant=tenant, name="drill").key

    def serve(self) -> None:
        """Start the gateway, and wait until it can take work."""
        environment = {f"PROMPTMILL_{name}": value for name, value in self._settings.items()}
        process = self.process = self.mill.start("serve", environment=environment)

        def is_ready() -> bool:
            assert process.poll() is None, self._last_words(f"the gateway ended with {process.poll()}")
            try:
                return httpx.get(f"{self.root}/readyz", trust_env=False, timeout=10).status_code == 200
            except httpx.TransportError:
                return False

        self.mill.wait(is_ready, "the gateway's start")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def _last_words(self, what: str) -> str:
        return f"{what}:\n{(self.mill.folder / 'serve.out').read_text(errors='replace')[-2000:]}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
