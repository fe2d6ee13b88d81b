"""Hugging Face model folders: config.json, safetensors (one file or shards), tokenizer and chat template.

The safetensors header is read here and tensors are memory-mapped: it is a page of JSON, and bfloat16 needs no library.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.models.description import (
    ChatFormat,
    LinearScaling,
    Llama3Scaling,
    ModelDescription,
    RopeScaling,
    TokenizerDescription,
    YarnScaling,
)
from workers.models.errors import UnreadableCheckpoint, UnsupportedModel
from workers.models.rope import yarn_attention_factor
from workers.models.vocabulary import (
    chat_format_without_template,
    json_added_tokens,
    json_adds_bos,
    json_is_llama2,
    sentencepiece_tokens,
)

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")

LAYER_TENSORS = {
    "input_layernorm.weight": "attention_norm.weight",
    "self_attn.q_proj.weight": "attention.q.weight",
    "self_attn.k_proj.weight": "attention.k.weight",
    "self_attn.v_proj.weight": "attention.v.weight",
    "self_attn.o_proj.weight": "attention.output.weight",
    "post_attention_layernorm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
TENSORS = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class HuggingFaceCheckpoint:
    """A folder as `transformers` saves it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: set[Path] = set()
        config = self._json("config.json", required=True)
        self.description = describe(config, str(folder / "config.json"))
        self._tensors = self._find_tensors()
        self._check_tensors()
        self.tokenizer_files: dict[str, bytes] = {}
        self.tokenizer = self._read_tokenizer(config)

    @property
    def source_files(self) -> list[Path]:
        return sorted(self._read)

    def tensor(self, name: str) -> NDArray[np.float32]:
        path, dtype, shape, offset = self._tensors[name]
        try:
            values: NDArray[Any] = np.memmap(path, dtype=_DTYPES[dtype], mode="r", offset=offset, shape=shape)
        except (OSError, ValueError) as error:
            raise UnreadableCheckpoint(f"{path}: tensor {name} cannot be read: {error}") from error
        if dtype == "BF16":
            return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.array(values, dtype=np.float32)

    def _json(self, name: str, required: bool = False) -> dict[str, Any]:
        """Read a JSON object of the folder; an optional file that is absent reads as empty."""
        path = self._folder / name
        if not path.exists() and not required:
            return {}
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnreadableCheckpoint(f"{path} cannot be read: {error}") from error
        if not isinstance(values, dict):
            raise UnreadableCheckpoint(f"{path} must hold a JSON object, not {type(values).__name__}")
        self._read.add(path)
        return values

    def _find_tensors(self) -> dict[str, tuple[Path, str, tuple[int, ...], int]]:
        """Map our tensor names to file, type, shape and offset."""
        index = self._json("model.safetensors.index.json")
        if index:
            shards = sorted(set(index.get("weight_map", {}).values()))
        elif (self._folder / "model.safetensors").exists():
            shards = ["model.safetensors"]
        elif any(self._folder.glob("*.bin")):
            raise UnsupportedModel(
                f"{self._folder} holds PyTorch .bin weights; only safetensors are read. "
                "Save the model again with safe_serialization=True"
            )
        else:
            raise UnreadableCheckpoint(f"{self._folder} has no model.safetensors and no model.safetensors.index.json")
        found = {}
        for shard in shards:
            path = self._folder / shard
            self._read.add(path)
            for name, entry in _safetensors_header(path).items():
                if name.endswith("rotary_emb.inv_freq"):  # old checkpoints carry the table that we compute
                    continue
                if entry[0] not in _DTYPES:
                    raise UnsupportedModel(
                        f"{path}: tensor {name} has type {entry[0]}; supported are {', '.join(sorted(_DTYPES))}"
                    )
                found[_our_name(name, path)] = (path, *entry)
        return found

    def _check_tensors(self) -> None:
        """Every tensor the graph needs is there in the right shape, and nothing else."""
        wanted = self.description.tensor_shapes()
        if self.description.tie_word_embeddings:
            self._tensors.pop("head.weight", None)
        for name, shape in wanted.items():
            entry = self._tensors.get(name)
            if entry is None:
                raise UnreadableCheckpoint(f"{self._folder}: tensor {name} is missing; is a shard missing?")
            if entry[2] != shape:
                raise UnreadableCheckpoint(
                    f"{entry[0]}: tensor {name} has shape {list(entry[2])}, config.json asks for {list(shape)}"
                )
        for name in self._tensors:
            if name not in wanted:
                raise UnreadableCheckpoint(
                    f"{self._folder}: tensor {name} lies beyond num_hidden_layers {self.description.num_layers}"
                )

    def _read_tokenizer(self, config: dict[str, Any]) -> TokenizerDescription:
        settings = self._json("tokenizer_config.json")
        generation = self._json("generation_config.json")
        beyond: dict[str, int] = {}
        if (self._folder / "tokenizer.json").exists():
            where = str(self._folder / "tokenizer.json")
            data = self.tokenizer_files["tokenizer.json"] = self._bytes("tokenizer.json")
            ids = {token.text: token.id for token in json_added_tokens(data, where)}
            bos = _first_id(config.get("bos_token_id"), ids.get(_token_text(settings.get("bos_token"))))
            default_bos = json_adds_bos(data, bos, where)
            is_llama2 = json_is_llama2(data)
        elif (self._folder / "tokenizer.model").exists():
            data = self.tokenizer_files["tokenizer.model"] = self._bytes("tokenizer.model")
            pieces = sentencepiece_tokens(data, str(self._folder / "tokenizer.model"))
            beyond = self._tokens_beyond(pieces.size, settings)
            ids = {**pieces.control, **beyond}
            bos = _first_id(config.get("bos_token_id"), ids.get(_token_text(settings.get("bos_token"))))
            default_bos = True
            is_llama2 = pieces.is_llama2
        else:
            raise UnreadableCheckpoint(
                f"{self._folder} has no tokenizer.json and no tokenizer.model; "
                "copy the tokenizer's files beside the weights"
            )
        eos = [
            *_ids(ids.get(_token_text(settings.get("eos_token")))),
            *_ids(generation.get("eos_token_id")),
            *_ids(config.get("eos_token_id")),
        ]
        template = self._chat_template(settings)
        chat_format: ChatFormat = chat_format_without_template(is_llama2)
        if template is not None:
            self.tokenizer_files["chat_template.jinja"] = template.encode()
            chat_format = "template"
        add_bos = settings.get("add_bos_token")
        return TokenizerDescription(
            bos_token_id=bos,
            eos_token_id=eos[0] if eos else None,
            # A model that writes BOS has begun another text.
            stop_token_ids=tuple(sorted({*eos, *_ids(bos)})),
            add_bos=(default_bos if add_bos is None else bool(add_bos)) and bos is not None,
            chat_format=chat_format,
            added_tokens=beyond,
        )

    def _tokens_beyond(self, size: int, settings: dict[str, Any]) -> dict[str, int]:
        """Special tokens that were added after the SentencePiece model was trained."""
        added = {str(text): int(token) for text, token in self._json("added_tokens.json").items()}
        for token, entry in settings.get("added_tokens_decoder", {}).items():
            if int(token) >= size:
                added[_token_text(entry) or ""] = int(token)
        return {text: token for text, token in added.items() if text and token >= size}

    def _chat_template(self, settings: dict[str, Any]) -> str | None:
        if (self._folder / "chat_template.jinja").exists():
            return self._bytes("chat_template.jinja").decode("utf-8")
        template = settings.get("chat_template")
        if isinstance(template, list):  # several named templates: the one called default
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None

    def _bytes(self, name: str) -> bytes:
        path = self._folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UnreadableCheckpoint(f"{path} cannot be read: {error.strerror}") from error
        self._read.add(path)
        return data


def describe(config: Mapping[str, Any], where: str) -> ModelDescription:
    """Read a config.json. where: its path, for messages. Raises UnsupportedModel, UnreadableCheckpoint."""
    architectures = config.get("architectures") or ["(none)"]
    if architectures[0] not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: architecture {architectures[0]} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    _refuse_variants(config, where)
    try:
        hidden_size = int(config["hidden_size"])
        num_heads = int(config["num_attention_heads"])
        context_length = int(config.get("max_position_embeddings", 2048))
        theta, scaling = _rope(config, context_length, where)
        if isinstance(scaling, LinearScaling):
            context_length = int(context_length * scaling.factor)
        elif isinstance(scaling, YarnScaling):
            context_length = max(context_length, int(scaling.original_context_length * scaling.factor))
        # Within its window, sliding attention is full attention.
        context_length = min(context_length, int(config.get("sliding_window") or context_length))
        description = ModelDescription(
            architecture="llama",
            vocab_size=int(config["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=int(config["intermediate_size"]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or hidden_size // num_heads),
            context_length=context_length,
            rms_norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UnreadableCheckpoint(f"{where}: key {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UnreadableCheckpoint(f"{where}: {error}") from error
    description.check(where)
    return description


def _refuse_variants(config: Mapping[str, Any], where: str) -> None:
    """Settings that change what the model computes and that the graph does not have."""
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModel(f"{where}: hidden_act {activation} is not supported; supported is silu")
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UnsupportedModel(f"{where}: {key} is set; projections with a bias are not supported")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise UnsupportedModel(
            f"{where}: weights quantized by {method} are not supported; "
            "give the unquantized checkpoint and choose --dtype int8 or int4"
        )


def _rope(config: Mapping[str, Any], context_length: int, where: str) -> tuple[float, RopeScaling | None]:
    """Return theta and scaling from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling`."""
    values: dict[str, Any] = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(values.get("rope_theta") or config.get("rope_theta") or 10000.0)
    partial = values.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise UnsupportedModel(f"{where}: partial_rotary_factor {partial} is not supported; supported is 1.0")
    kind = values.get("rope_type") or values.get("type") or "default"
    original = int(values.get("original_max_position_embeddings") or context_length)
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, LinearScaling(factor=float(values["factor"]))
        case "llama3":
            return theta, Llama3Scaling(
                factor=float(values["factor"]),
                low_freq_factor=float(values["low_freq_factor"]),
                high_freq_factor=float(values["high_freq_factor"]),
                original_context_length=original,
            )
        case "yarn":
            factor = float(values.get("factor") or context_length / original)
            attention_factor = values.get("attention_factor")
            if attention_factor is None:
                attention_factor = yarn_attention_factor(factor, values.get("mscale"), values.get("mscale_all_dim"))
            return theta, YarnScaling(
                factor=factor,
                original_context_length=original,
                attention_factor=float(attention_factor),
                beta_fast=float(values.get("beta_fast") or 32),
                beta_slow=float(values.get("beta_slow") or 1),
                truncate=bool(values.get("truncate", True)),
            )
        case _:
            raise UnsupportedModel(
                f"{where}: rope scaling {kind} is not supported; supported are default, linear, llama3 and yarn"
            )


def _our_name(name: str, path: Path) -> str:
    if name in TENSORS:
        return TENSORS[name]
    prefix, _, rest = name.removeprefix("model.layers.").partition(".")
    if name.startswith("model.layers.") and prefix.isdigit() and rest in LAYER_TENSORS:
        return f"layers.{prefix}.{LAYER_TENSORS[rest]}"
    raise UnsupportedModel(
        f"{path}: tensor {name} is not supported; supported are {', '.join(sorted(TENSORS))} "
        f"and model.layers.N with {', '.join(sorted(LAYER_TENSORS))}"
    )


def _safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], int]]:
    """Return type, shape and absolute offset of each tensor, checked against the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 0 < length <= min(size - 8, _MAX_HEADER_BYTES):
                raise UnreadableCheckpoint(f"{path} is not a safetensors file, or is cut short")
            header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            if 8 + length + end > size:
                raise UnreadableCheckpoint(
                    f"{path} is cut short: tensor {name} ends at byte {8 + length + end}, the file has {size}"
                )
            tensors[name] = (str(entry["dtype"]), tuple(int(n) for n in entry["shape"]), 8 + length + int(begin))
        return tensors
    except OSError as error:
        raise UnreadableCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpoint(f"{path} has a broken safetensors header: {error}") from error


def _token_text(token: Any) -> str:
    """A special token is a string, or an object with its `content`; absent reads as no text."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(value: Any) -> list[int]:
    """Token ids come as one number, a list, or not at all."""
    if value is None:
        return []
    return [int(item) for item in value] if isinstance(value, list) else [int(value)]


def _first_id(*values: Any) -> int | None:
    for value in values:
        for token in _ids(value):
            return token
    return None
