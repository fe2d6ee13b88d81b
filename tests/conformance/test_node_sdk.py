"""The gateway through the real `openai` package for Node, pinned by the lock file beside the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from storage import transitions
from tests.conformance.conftest import MODEL
from tests.conftest import missing
from tests.drills.served import ServedMill

SUITE = Path(__file__).with_name("node")
PATIENCE_S = 400


@pytest.fixture(scope="session")
def node_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the suite with the SDK installed beside it."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        missing("no Node.js on this machine (node and npm on PATH)")
    folder = tmp_path_factory.mktemp("node") / "suite"
    shutil.copytree(SUITE, folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline", "--fetch-retries", "5"]
    made = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S
    )
    if made.returncode != 0:
        missing(f"npm could not install the SDK: {made.stderr[-2000:]}")
    return folder


@pytest.mark.timeout(900)
def test_the_sdk_for_node_finds_what_it_expects(node_suite: Path, live: ServedMill, tenant: str) -> None:
    limited = f"{tenant}-limited"
    with live.mill.database.write() as connection:
        transitions.set_quotas(connection, limited, {"max_requests_per_minute": 1})
    environment = {
        **os.environ,
        "BASE_URL": live.url,
        "API_KEY": live.key(tenant),
        "LIMITED_KEY": live.key(limited),
        "MODEL": MODEL,
    }
    ran = subprocess.run(
        ["node", "--test", "--test-reporter=spec", "sdk.test.mjs"],
        cwd=node_suite,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert ran.returncode == 0, ran.stdout[-10_000:]
    tests = (node_suite / "sdk.test.mjs").read_text().count('\ntest("')
    assert f"ℹ pass {tests}\n" in ran.stdout, ran.stdout[-10_000:]
