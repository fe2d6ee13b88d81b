"""What the benchmark of a GPU is made of: its figures, its workloads, its peer.

A run on a pretended device: tests/workers/engine/test_cuda.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import agreement, figures_of
from benchmarks.gpu_peer import write_checkpoint
from benchmarks.workloads import make_workload
from tests.checkpoints import DESCRIPTION, byte_level_tokenizer, random_weights, save_huggingface
from workers.models.artifact import Artifact
from workers.models.checkpoint import open_checkpoint
from workers.models.convert import convert
from workers.tokenizer import Tokenizer


def test_figures_are_held_against_those_wanted() -> None:
    def runs(rate: float, **more: Any) -> dict[str, Any]:
        return {"best": rate, "runs": [{"requests_per_s": rate, "device": {"utilization_percent": 95.0}, **more}]}

    report = {
        "options": {"artifact": None},
        "shape": "llama2-7b",
        "start_s": 8.0,
        "kv_cache": {"share": 0.94, "holds_all_rows": False},
        "w5_of_w1": 0.96,
        "results": {
            "W1": runs(160.0),
            "W3": runs(20.0),
            "W5": runs(150.0),
            "small": runs(9.0, steps={"busy_share": 0.85}),
        },
    }
    peer = {"results": {"W1": [{"requests_per_s": 140.0}, {"requests_per_s": 150.0}]}}
    met = {figure.name: figure.is_met for figure in figures_of(report, peer)}
    assert met == {
        "W1, requests/s, of the peer's": True,
        "W3, requests/s, of the peer's": None,
        "W5, of the engine alone": True,
        "W1, utilization by NVML, percent": True,
        "W3, utilization by NVML, percent": True,
        "small, share of the run with a step in flight": True,
        "KV cache, of the memory left for it": False,
        "start, seconds": True,
    }


def test_answers_agree_up_to_their_first_difference() -> None:
    found = agreement([[1, 2, 3], [4, 5], [6], []], [[1, 2, 3], [4, 7], [6, 8], []])
    assert found == {"answers": 4, "same": 2, "tokens": 7, "same_tokens": 5}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """Of the checkpoint in the folder `model`."""
    save_huggingface(tmp_path / "model", DESCRIPTION, random_weights(DESCRIPTION))
    return convert(str(tmp_path / "model"), tmp_path / "artifact", dtype="float16", cache=tmp_path)


def test_the_peer_is_given_the_weights_of_an_artifact(artifact: Artifact, tmp_path: Path) -> None:
    """What is written is read back as the checkpoint that the artifact was made of, in float16."""
    (tmp_path / "peer").mkdir()
    write_checkpoint(artifact, tmp_path / "peer")
    byte_level_tokenizer().save(str(tmp_path / "peer" / "tokenizer.json"))
    original, written = open_checkpoint(tmp_path / "model"), open_checkpoint(tmp_path / "peer")
    assert written.description == original.description
    for name in original.description.tensor_shapes():
        np.testing.assert_array_equal(written.tensor(name), original.tensor(name).astype(np.float16), err_msg=name)


def test_questions_are_asked_in_the_words_of_the_model(artifact: Artifact) -> None:
    work, other = (make_workload("questions", artifact.description, seed, artifact) for seed in (1, 2))
    assert len(work.prompts) == len(work.new_tokens) == 2048
    assert work.stop_token_ids == artifact.tokenizer.stop_token_ids
    text = Tokenizer(artifact).decode(work.prompts[0])
    assert "When was the Elmbrook Tool Library founded?" in text
    assert "\n## " in text
    assert not {tuple(prompt) for prompt in work.prompts} & {tuple(prompt) for prompt in other.prompts}
    work.check([[5]] * 2048)
    with pytest.raises(AssertionError, match="65 of 64"):
        work.check([[5] * 65] * 2048)
    with pytest.raises(AssertionError, match="63 of 64"):
        make_workload("one", artifact.description, 1).check([[5] * 63])
