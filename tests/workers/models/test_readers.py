"""Checkpoints are read as what they are, whatever they are wrapped in, and refused by name where they are not ours."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.constants import GGML_QUANT_SIZES

from tests.checkpoints import DESCRIPTION, random_weights, save_gguf, save_huggingface, save_sentencepiece
from workers.models.checkpoint import open_checkpoint
from workers.models.description import (
    FrequencyFactors,
    LinearScaling,
    Llama3Scaling,
    ModelDescription,
    TokenizerDescription,
    YarnScaling,
)
from workers.models.errors import UnreadableCheckpoint, UnsupportedModel

WEIGHTS = random_weights(DESCRIPTION)
TIED = dataclasses.replace(DESCRIPTION, tie_word_embeddings=True)


def test_a_huggingface_folder_is_described_by_its_config(tmp_path: Path) -> None:
    """The explicit head_dim counts, not hidden_size / heads; so does every other key."""
    checkpoint = open_checkpoint(save_huggingface(tmp_path, DESCRIPTION, WEIGHTS))
    assert checkpoint.description == DESCRIPTION
    assert checkpoint.tokenizer == TokenizerDescription(
        bos_token_id=256, eos_token_id=258, stop_token_ids=(256, 258), add_bos=False, chat_format="template"
    )


def test_a_gguf_file_describes_the_same_model(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", DESCRIPTION, WEIGHTS))
    assert checkpoint.description == DESCRIPTION
    assert checkpoint.tokenizer == TokenizerDescription(
        bos_token_id=256, eos_token_id=258, stop_token_ids=(256, 258), add_bos=False, chat_format="template"
    )


def test_every_source_of_the_same_weights_gives_the_same_tensors(tmp_path: Path) -> None:
    """Shards, and the rotary rows that GGUF stores in pairs, are the reader's business alone."""
    sources = [
        save_huggingface(tmp_path / "whole", DESCRIPTION, WEIGHTS),
        save_huggingface(tmp_path / "shards", DESCRIPTION, WEIGHTS, shards=3),
        save_gguf(tmp_path / "m.gguf", DESCRIPTION, WEIGHTS),
    ]
    for source in sources:
        checkpoint = open_checkpoint(source)
        for name, wanted in WEIGHTS.items():
            found = checkpoint.tensor(name)
            assert found.dtype == np.float32
            np.testing.assert_array_equal(found, wanted, err_msg=f"{source.name}: {name}")


def test_a_tied_head_is_not_asked_for(tmp_path: Path) -> None:
    weights = random_weights(TIED)
    assert "head.weight" not in weights
    assert open_checkpoint(save_gguf(tmp_path / "m.gguf", TIED, weights)).description.tie_word_embeddings
    folder = save_huggingface(tmp_path / "hf", TIED, weights)
    assert open_checkpoint(folder).description == TIED


def test_sixteen_bit_tensors_are_widened_exactly(tmp_path: Path) -> None:
    """bfloat16 is the upper half of float32; safetensors' NumPy side does not know it."""
    halves: dict[str, Any] = {name: values.astype(np.float16) for name, values in WEIGHTS.items()}
    checkpoint = open_checkpoint(save_huggingface(tmp_path / "float16", DESCRIPTION, halves))
    wanted = WEIGHTS["norm.weight"].astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(checkpoint.tensor("norm.weight"), wanted)

    folder = save_huggingface(tmp_path / "bfloat16", DESCRIPTION, halves)
    _call_float16_bfloat16(folder / "model.safetensors")
    bits = WEIGHTS["norm.weight"].astype(np.float16).view(np.uint16)
    wanted = (bits.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(open_checkpoint(folder).tensor("norm.weight"), wanted)


@pytest.mark.parametrize(
    "kind",
    [
        GGMLQuantizationType.F16,
        GGMLQuantizationType.BF16,
        GGMLQuantizationType.Q8_0,
        GGMLQuantizationType.Q5_1,
        GGMLQuantizationType.Q4_1,
        GGMLQuantizationType.Q4_0,
    ],
    ids=lambda kind: kind.name,
)
def test_gguf_blocks_read_as_the_numbers_they_stand_for(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", DESCRIPTION, WEIGHTS, kind=kind))
    for name in ("embedding.weight", "layers.1.mlp.down.weight"):
        wanted = gguf.quants.dequantize(gguf.quants.quantize(WEIGHTS[name], kind), kind)
        np.testing.assert_array_equal(checkpoint.tensor(name), wanted)
    # q is permuted before it is cut into blocks; blocks run along a row, so rows keep their numbers.
    wanted = gguf.quants.dequantize(gguf.quants.quantize(WEIGHTS["layers.0.attention.q.weight"], kind), kind)
    np.testing.assert_array_equal(checkpoint.tensor("layers.0.attention.q.weight"), wanted)


@pytest.mark.parametrize("kind", sorted(gguf.quants._type_traits), ids=lambda kind: kind.name)
def test_every_block_type_that_the_package_dequantizes_is_accepted(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    """Rows of 256 hold whole blocks of every type; blocks of zero bytes are valid in all of them."""
    description = dataclasses.replace(
        DESCRIPTION, hidden_size=256, intermediate_size=256, head_dim=64, num_heads=4, num_kv_heads=4, num_layers=1
    )
    path = tmp_path / "m.gguf"
    weights = random_weights(description)
    del weights["layers.0.mlp.up.weight"]
    block_values, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.zeros((256, 256 // block_values * block_bytes), dtype=np.uint8)
    _save_with_raw_tensor(path, description, weights, "blk.0.ffn_up.weight", blocks, kind)
    assert open_checkpoint(path).tensor("layers.0.mlp.up.weight").shape == (256, 256)


def test_rope_scaling_is_read_under_its_old_and_its_new_keys(tmp_path: Path) -> None:
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old: dict[str, Any] = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **llama3}}
    new: dict[str, Any] = {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **llama3}}
    for number, config in enumerate((old, new)):
        found = open_checkpoint(save_huggingface(tmp_path / str(number), DESCRIPTION, WEIGHTS, config=config))
        assert found.description.rope_theta == 5e5
        assert found.description.rope_scaling == Llama3Scaling(8.0, 1.0, 4.0, 64)
        assert found.description.context_length == 128


def test_scaled_positions_lengthen_the_context(tmp_path: Path) -> None:
    """Linear and YaRN scaling state the trained context; the scaled one is what the model is meant to read."""
    linear = {"rope_scaling": {"type": "linear", "factor": 4.0}}
    found = open_checkpoint(save_huggingface(tmp_path / "linear", DESCRIPTION, WEIGHTS, config=linear)).description
    assert (found.rope_scaling, found.context_length) == (LinearScaling(4.0), 512)

    yarn = {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}}
    found = open_checkpoint(save_huggingface(tmp_path / "yarn", DESCRIPTION, WEIGHTS, config=yarn)).description
    assert isinstance(found.rope_scaling, YarnScaling)
    assert found.rope_scaling.attention_factor == pytest.approx(0.1 * np.log(2.0) + 1)
    assert found.context_length == 256


def test_gguf_scaling_comes_from_keys_or_from_the_factors_tensor(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    found = open_checkpoint(save_gguf(tmp_path / "linear.gguf", DESCRIPTION, WEIGHTS, keys=keys)).description
    assert found.rope_scaling == LinearScaling(2.0)

    factors = np.linspace(1, 8, DESCRIPTION.head_dim // 2, dtype=np.float32)
    extra = {"rope_freqs.weight": factors}
    found = open_checkpoint(save_gguf(tmp_path / "llama3.gguf", DESCRIPTION, WEIGHTS, extra=extra)).description
    assert found.rope_scaling == FrequencyFactors(tuple(float(factor) for factor in factors))


def test_stop_tokens_are_gathered_from_every_file_that_names_one(tmp_path: Path) -> None:
    """Llama 3 ends a turn with another token than a text; generation_config knows, config.json may not."""
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, config={"eos_token_id": [270, 271]})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [272, 270]}))
    tokenizer = open_checkpoint(folder).tokenizer
    assert tokenizer.stop_token_ids == (256, 258, 270, 271, 272)
    assert tokenizer.eos_token_id == 258


def test_the_chat_template_is_found_wherever_it_is_kept(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, template=None)
    assert open_checkpoint(folder).tokenizer.chat_format == "plain"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert open_checkpoint(folder).tokenizer_files["chat_template.jinja"] == b"yes"
    (folder / "chat_template.jinja").write_text("file")
    assert open_checkpoint(folder).tokenizer_files["chat_template.jinja"] == b"file"


def test_special_tokens_beyond_a_sentencepiece_model_are_kept(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS)
    (folder / "tokenizer.json").unlink()
    size = 259 + 11
    save_sentencepiece(folder / "tokenizer.model")
    decoder = {"1": {"content": "<s>"}, str(size): {"content": "<|im_start|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder, "bos_token": "<s>"}))
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.tokenizer_files) == ["tokenizer.model"]
    assert checkpoint.tokenizer.added_tokens == {"<|im_start|>": size}
    assert checkpoint.tokenizer.add_bos


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["MixtralForCausalLM", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act gelu", "silu"]),
        ({"attention_bias": True}, ["attention_bias", "bias"]),
        ({"mlp_bias": True}, ["mlp_bias"]),
        ({"quantization_config": {"quant_method": "awq"}}, ["awq", "--dtype int8"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor 0.5"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope scaling dynamic", "linear, llama3 and yarn"]),
    ],
)
def test_what_the_graph_cannot_run_is_refused_by_name(tmp_path: Path, config: dict[str, Any], words: list[str]) -> None:
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, config=config)
    with pytest.raises(UnsupportedModel) as refusal:
        open_checkpoint(folder)
    for word in [*words, "config.json"]:
        assert word in refusal.value.message
    assert refusal.value.code == "unsupported_model"


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.q_proj.bias"])
def test_a_tensor_the_graph_has_no_place_for_is_refused_by_name(tmp_path: Path, name: str) -> None:
    extra = {name: np.ones(32, dtype=np.float32)}
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, extra=extra)
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(folder)


def test_rotary_tables_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, dtype=np.float32)}
    open_checkpoint(save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, extra=extra))


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"architecture": "qwen2"}, "qwen2"),
        ({"keys": {"llama.expert_count": 8}}, "8 experts"),
        ({"keys": {"llama.rope.scaling.type": "longrope"}}, "longrope"),
        ({"pre": "bert-bge"}, "bert-bge"),
        ({"vocabulary": "t5"}, "tokenizer t5"),
        ({"extra": {"blk.0.attn_q.bias": np.ones(64, dtype=np.float32)}}, "blk.0.attn_q.bias"),
    ],
)
def test_gguf_files_of_other_models_are_refused_by_name(tmp_path: Path, changes: dict[str, Any], word: str) -> None:
    path = save_gguf(tmp_path / "m.gguf", DESCRIPTION, WEIGHTS, **changes)
    with pytest.raises(UnsupportedModel, match=word):
        open_checkpoint(path)


def test_a_block_type_without_a_dequantizer_is_refused_by_name(tmp_path: Path) -> None:
    kind = GGMLQuantizationType.Q8_1
    values, size = GGML_QUANT_SIZES[kind]
    blocks = np.zeros((DESCRIPTION.intermediate_size, DESCRIPTION.hidden_size // values * size), dtype=np.uint8)
    weights = {name: value for name, value in WEIGHTS.items() if name != "layers.0.mlp.up.weight"}
    _save_with_raw_tensor(tmp_path / "m.gguf", DESCRIPTION, weights, "blk.0.ffn_up.weight", blocks, kind)
    with pytest.raises(UnsupportedModel, match=r"blk.0.ffn_up.weight has block type Q8_1"):
        open_checkpoint(tmp_path / "m.gguf")


@pytest.mark.parametrize("kept", [0.999, 0.9, 0.5, 0.01])
def test_a_cut_file_is_said_to_be_cut(tmp_path: Path, kept: float) -> None:
    """A download that broke off must not become an artifact."""
    folder = save_huggingface(tmp_path / "hf", DESCRIPTION, WEIGHTS)
    path = save_gguf(tmp_path / "m.gguf", DESCRIPTION, WEIGHTS)
    for file in (folder / "model.safetensors", path):
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    for source in (folder, path):
        with pytest.raises(UnreadableCheckpoint, match="cut short"):
            open_checkpoint(source)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnreadableCheckpoint, match=r"model-00002-of-00002.safetensors"):
        open_checkpoint(folder)


def test_a_missing_tensor_and_a_wrong_shape_are_named(tmp_path: Path) -> None:
    fewer = {name: values for name, values in WEIGHTS.items() if name != "layers.1.mlp.up.weight"}
    with pytest.raises(UnreadableCheckpoint, match=r"layers.1.mlp.up.weight is missing"):
        open_checkpoint(save_huggingface(tmp_path / "fewer", DESCRIPTION, fewer))
    wrong = {**WEIGHTS, "norm.weight": np.ones(63, dtype=np.float32)}
    with pytest.raises(UnreadableCheckpoint, match=r"norm.weight has shape \[63\], config.json asks for \[64\]"):
        open_checkpoint(save_huggingface(tmp_path / "wrong", DESCRIPTION, wrong))
    with pytest.raises(UnreadableCheckpoint, match=r"output_norm.weight has shape \[63\], the keys ask for \[64\]"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", DESCRIPTION, wrong))


def test_a_path_that_is_no_checkpoint_says_what_one_is(tmp_path: Path) -> None:
    with pytest.raises(UnreadableCheckpoint, match="does not exist"):
        open_checkpoint(tmp_path / "absent")
    with pytest.raises(UnreadableCheckpoint, match=r"no config.json and no .gguf"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UnreadableCheckpoint, match=r"config.json cannot be read"):
        open_checkpoint(tmp_path)
    (tmp_path / "text.gguf").write_text("not a model")
    with pytest.raises(UnreadableCheckpoint, match="not a GGUF file"):
        open_checkpoint(tmp_path / "text.gguf")


def test_impossible_dimensions_are_refused(tmp_path: Path) -> None:
    for config, words in (
        ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
        ({"vocab_size": 0}, "vocab_size 0"),
        ({"hidden_size": None}, "config.json"),
    ):
        with pytest.raises(UnreadableCheckpoint, match=words):
            open_checkpoint(save_huggingface(tmp_path, DESCRIPTION, WEIGHTS, config=config))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LinearScaling(2.0),
        Llama3Scaling(8.0, 1.0, 4.0, 64),
        YarnScaling(4.0, 64, 1.1, truncate=False),
        FrequencyFactors((1.0, 2.0)),
    ],
)
def test_descriptions_survive_the_manifest(scaling: Any) -> None:
    description = dataclasses.replace(DESCRIPTION, rope_scaling=scaling)
    assert ModelDescription.from_json(json.loads(json.dumps(description.to_json()))) == description


def _call_float16_bfloat16(path: Path) -> None:
    """Change the types in a safetensors header; the bytes of the tensors stay."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = data[8:end].replace(b'"F16"', b'"BF16"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])


def _save_with_raw_tensor(
    path: Path,
    description: ModelDescription,
    weights: dict[str, Any],
    name: str,
    blocks: Any,
    kind: GGMLQuantizationType,
) -> None:
    """Write a GGUF file with one tensor of ready-made blocks."""

    class Writer(gguf.GGUFWriter):  # type: ignore[misc]
        def write_header_to_file(self, path: Path | None = None) -> None:
            self.add_tensor(name, blocks, raw_dtype=kind)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", Writer)
        save_gguf(path, description, weights)
