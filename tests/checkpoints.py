"""Tiny random checkpoints in the formats that people have: Hugging Face folders, whole and in shards, and GGUF files.

The same weights can be written in both, so that readers can be held against each other. Odd on purpose: 3 KV heads
under 6 query heads, a head size that hidden_size does not give, a vocabulary that no block divides.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from workers.models.description import ModelDescription, TokenizerDescription
from workers.models.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, sentencepiece_model

Weights = dict[str, NDArray[np.float32]]

DESCRIPTION = ModelDescription(
    architecture="llama",
    vocab_size=277,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=3,
    head_dim=32,
    context_length=128,
    rms_norm_epsilon=1e-5,
    rope_theta=10000.0,
    rope_scaling=None,
    tie_word_embeddings=False,
)

_HF_NAMES = {
    "embedding.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}
_GGUF_NAMES = {
    "embedding.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    "attention_norm.weight": "attn_norm.weight",
    "attention.q.weight": "attn_q.weight",
    "attention.k.weight": "attn_k.weight",
    "attention.v.weight": "attn_v.weight",
    "attention.output.weight": "attn_output.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate.weight",
    "mlp.up.weight": "ffn_up.weight",
    "mlp.down.weight": "ffn_down.weight",
}

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|bos|>", "<|start|>", "<|end|>")


def random_weights(description: ModelDescription, seed: int = 0) -> Weights:
    """Random weights of about the size that trained ones have, under this program's names."""
    random = np.random.default_rng(seed)
    weights = {}
    for name, shape in description.tensor_shapes().items():
        if len(shape) == 1:
            values = random.uniform(0.5, 1.5, shape)
        else:
            values = random.standard_normal(shape) / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights


def save_huggingface(
    folder: Path,
    description: ModelDescription,
    weights: Weights,
    *,
    config: Mapping[str, Any] | None = None,
    shards: int = 1,
    template: str | None = CHAT_TEMPLATE,
    extra: Weights | None = None,
) -> Path:
    """Write a folder as transformers saves it. config: keys to add or replace. extra: further tensors, as named."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": description.vocab_size,
        "hidden_size": description.hidden_size,
        "intermediate_size": description.intermediate_size,
        "num_hidden_layers": description.num_layers,
        "num_attention_heads": description.num_heads,
        "num_key_value_heads": description.num_kv_heads,
        "head_dim": description.head_dim,
        "max_position_embeddings": description.context_length,
        "rms_norm_eps": description.rms_norm_epsilon,
        "rope_theta": description.rope_theta,
        "tie_word_embeddings": description.tie_word_embeddings,
        "hidden_act": "silu",
        "bos_token_id": 256,
        "eos_token_id": 258,
        **(config or {}),
    }
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = {_renamed(name, _HF_NAMES, "model.layers."): values for name, values in weights.items()} | (extra or {})
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        _save_shards(folder, tensors, shards)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config: dict[str, Any] = {"bos_token": {"content": "<|bos|>"}, "eos_token": "<|end|>"}
    if template is not None:
        tokenizer_config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """All bytes, a few merges, three special tokens from 256 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_lists() -> tuple[list[str], list[str], list[int]]:
    """Tokens, merges and types of a GPT-2 style vocabulary, as a GGUF file holds them."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, "he", "ll", "hell", "hello", "Ġhello"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello"]
    return tokens, merges, [NORMAL] * 256 + [CONTROL] * 3 + [NORMAL] * 5


def sentencepiece_lists() -> tuple[list[str], list[float], list[int]]:
    """Pieces, scores and types of a small Llama vocabulary with byte fallback."""
    words = ["▁", "h", "e", "l", "o", "▁h", "el", "lo", "ello", "▁hello", "é"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(words)]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(words), 0, -1)]
    return tokens, scores, types


def save_gguf(
    path: Path,
    description: ModelDescription,
    weights: Weights,
    *,
    vocabulary: str = "gpt2",
    pre: str = "smollm",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    template: str | None = CHAT_TEMPLATE,
    keys: Mapping[str, Any] | None = None,
    extra: Weights | None = None,
    architecture: str = "llama",
) -> Path:
    """Write a GGUF file as llama.cpp's converter does, q and k rows in its order.

    kind: the block type of the matrices. keys: further integer, float or string keys. extra: further tensors, as named.
    """
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(description.context_length)
    writer.add_embedding_length(description.hidden_size)
    writer.add_block_count(description.num_layers)
    writer.add_feed_forward_length(description.intermediate_size)
    writer.add_head_count(description.num_heads)
    writer.add_head_count_kv(description.num_kv_heads)
    writer.add_key_length(description.head_dim)
    writer.add_value_length(description.head_dim)
    writer.add_rope_dimension_count(description.head_dim)
    writer.add_layer_norm_rms_eps(description.rms_norm_epsilon)
    writer.add_rope_freq_base(description.rope_theta)
    for key, value in (keys or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(key, value)
    _add_vocabulary(writer, vocabulary, pre)
    if template is not None:
        writer.add_chat_template(template)
    for name, values in weights.items():
        stored = _renamed(name, _GGUF_NAMES, "blk.")
        if name.endswith(("attention.q.weight", "attention.k.weight")):
            values = halves_to_pairs(values, description.head_dim)
        if values.ndim == 1 or kind is GGMLQuantizationType.F32:
            writer.add_tensor(stored, values)
        else:
            writer.add_tensor(stored, gguf.quants.quantize(values, kind), raw_dtype=kind)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def halves_to_pairs(weight: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """llama.cpp's order of rotary rows: channel i and i + half become neighbours."""
    halves = weight.reshape(-1, 2, head_dim // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def save_sentencepiece(path: Path) -> Path:
    tokens, scores, types = sentencepiece_lists()
    path.write_bytes(sentencepiece_model(tokens, scores, types, bos_token_id=1, eos_token_id=2, add_space_prefix=True))
    return path


def tokenizer_description(**changes: Any) -> TokenizerDescription:
    values: dict[str, Any] = {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "stop_token_ids": (2,),
        "add_bos": True,
        "chat_format": "plain",
    }
    return TokenizerDescription(**(values | changes))


def _add_vocabulary(writer: gguf.GGUFWriter, vocabulary: str, pre: str) -> None:
    writer.add_tokenizer_model(vocabulary)
    if vocabulary == "llama":
        tokens, scores, types = sentencepiece_lists()
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        return
    tokens, merges, types = byte_level_lists()
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)


def _renamed(name: str, names: Mapping[str, str], layer_prefix: str) -> str:
    if name in names:
        return names[name]
    _, layer, rest = name.split(".", 2)
    return f"{layer_prefix}{layer}.{names[rest]}"


def _save_shards(folder: Path, tensors: Weights, shards: int) -> None:
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
