"""GGUF files of the `llama` architecture: every block type that the gguf package can dequantize.

GGUF stores the q and k rows of a head as rotary pairs one after the other; they are put back into halves here.
"""

import struct
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from numpy.typing import NDArray

from workers.models.description import (
    ChatFormat,
    FrequencyFactors,
    LinearScaling,
    ModelDescription,
    RopeScaling,
    TokenizerDescription,
    YarnScaling,
)
from workers.models.errors import UnreadableCheckpoint, UnsupportedModel
from workers.models.rope import yarn_attention_factor
from workers.models.vocabulary import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    byte_level_json,
    chat_format_without_template,
    pre_tokenizer,
    sentencepiece_model,
    sentencepiece_tokens,
)

ARCHITECTURE = "llama"

_VALUES_AT_ONCE = 1 << 20

_LAYER_TENSORS = {
    "attn_norm.weight": "attention_norm.weight",
    "attn_q.weight": "attention.q.weight",
    "attn_k.weight": "attention.k.weight",
    "attn_v.weight": "attention.v.weight",
    "attn_output.weight": "attention.output.weight",
    "ffn_norm.weight": "mlp_norm.weight",
    "ffn_gate.weight": "mlp.gate.weight",
    "ffn_up.weight": "mlp.up.weight",
    "ffn_down.weight": "mlp.down.weight",
}
_TENSORS = {
    "token_embd.weight": "embedding.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "head.weight",
}
_ROPE_FACTORS = "rope_freqs.weight"
# A model that was taught to end its turn with one of these ends it whatever the file's eos says.
_END_OF_TURN = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
)
# Keys that scale or window what the graph computes plainly.
_UNSUPPORTED_KEYS = ("attention.sliding_window", "attention.scale", "logit_scale", "residual_scale", "embedding_scale")


class GgufCheckpoint:
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._reader = _FastReader(path)
        # The reader trusts the file, so a cut one fails wherever the cut happens to be.
        except (OSError, ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
            raise UnreadableCheckpoint(f"{path} is not a GGUF file, or is cut short: {error}") from error
        architecture = self._value("general.architecture")
        if architecture != ARCHITECTURE:
            raise UnsupportedModel(
                f"{path}: architecture {architecture} is not supported; supported in GGUF is {ARCHITECTURE}"
            )
        self._tensors = self._find_tensors()
        self.description = self._describe()
        self._check_tensors()
        self.tokenizer_files: dict[str, bytes] = {}
        self.tokenizer = self._read_tokenizer()
        # The reader keeps an array object for every token: more memory than the weights of a small model.
        self._reader.fields.clear()

    @property
    def source_files(self) -> list[Path]:
        return [self._path]

    def tensor(self, name: str) -> NDArray[np.float32]:
        stored = self._tensors[name]
        weight = _dequantize_by_parts(stored.data, stored.tensor_type, tuple(reversed(stored.shape)))
        if name.endswith("attention.q.weight"):
            return _pairs_to_halves(weight, self.description.num_heads)
        if name.endswith("attention.k.weight"):
            return _pairs_to_halves(weight, self.description.num_kv_heads)
        return weight

    def _value(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def _model_value(self, key: str, default: Any = None) -> Any:
        return self._value(f"{ARCHITECTURE}.{key}", default)

    def _required(self, key: str) -> Any:
        value = self._model_value(key)
        if value is None:
            raise UnreadableCheckpoint(f"{self._path}: key {ARCHITECTURE}.{key} is missing")
        return value

    def _find_tensors(self) -> dict[str, Any]:
        """Map our tensor names to the reader's tensors."""
        found = {}
        for tensor in self._reader.tensors:
            name = _our_name(tensor.name, self._path)
            kind = GGMLQuantizationType(tensor.tensor_type)
            try:
                # A block of zeros asks the package itself what it can dequantize.
                dequantize(np.zeros(_block_bytes(kind), dtype=np.uint8), kind)
            except NotImplementedError as error:
                raise UnsupportedModel(
                    f"{self._path}: tensor {tensor.name} has block type {kind.name}, which the gguf package cannot "
                    "dequantize; quantize the model to another type, such as Q8_0"
                ) from error
            found[name] = tensor
        return found

    def _describe(self) -> ModelDescription:
        for key in _UNSUPPORTED_KEYS:
            value = self._model_value(key)
            if value:
                raise UnsupportedModel(f"{self._path}: key {ARCHITECTURE}.{key} = {value} is not supported")
        if self._model_value("expert_count", 0):
            raise UnsupportedModel(
                f"{self._path}: {self._model_value('expert_count')} experts; only dense models are supported"
            )
        hidden_size, num_heads = int(self._required("embedding_length")), self._required("attention.head_count")
        num_kv_heads = self._model_value("attention.head_count_kv", num_heads)
        if isinstance(num_heads, list) or isinstance(num_kv_heads, list):
            raise UnsupportedModel(f"{self._path}: head counts that differ between layers are not supported")
        head_dim = int(self._model_value("attention.key_length", hidden_size // num_heads))
        if int(self._model_value("attention.value_length", head_dim)) != head_dim:
            raise UnsupportedModel(f"{self._path}: value heads of another size than key heads are not supported")
        if int(self._model_value("rope.dimension_count", head_dim)) != head_dim:
            raise UnsupportedModel(
                f"{self._path}: rotary positions on {self._model_value('rope.dimension_count')} of {head_dim} channels "
                "are not supported; all must turn"
            )
        context_length = int(self._required("context_length"))
        scaling = self._rope_scaling(context_length)
        if isinstance(scaling, YarnScaling):
            context_length = max(context_length, int(scaling.original_context_length * scaling.factor))
        embedding = self._tensors.get("embedding.weight")
        description = ModelDescription(
            architecture="llama",
            # The table's own rows: the key may count the tokens before padding.
            vocab_size=int(self._model_value("vocab_size", 1) if embedding is None else embedding.shape[1]),
            hidden_size=hidden_size,
            intermediate_size=int(self._required("feed_forward_length")),
            num_layers=int(self._required("block_count")),
            num_heads=int(num_heads),
            num_kv_heads=int(num_kv_heads),
            head_dim=head_dim,
            context_length=context_length,
            rms_norm_epsilon=float(
                np.format_float_positional(np.float32(self._required("attention.layer_norm_rms_epsilon")), unique=True)
            ),
            rope_theta=float(self._model_value("rope.freq_base", 10000.0)),
            rope_scaling=scaling,
            tie_word_embeddings="head.weight" not in self._tensors,
        )
        description.check(str(self._path))
        return description

    def _rope_scaling(self, context_length: int) -> RopeScaling | None:
        kind = self._model_value("rope.scaling.type", "none")
        factor = float(self._model_value("rope.scaling.factor", 0.0) or self._model_value("rope.scale_linear", 1.0))
        factors = self._tensors.pop("rope.factors", None)
        if factors is not None:
            if kind not in ("none", "llama3"):
                raise UnsupportedModel(f"{self._path}: {_ROPE_FACTORS} together with {kind} scaling is not supported")
            values = dequantize(factors.data, factors.tensor_type).reshape(-1)
            return FrequencyFactors(tuple(float(value) for value in values))
        match kind:
            case "none":
                return None
            case "linear":
                return LinearScaling(factor) if factor != 1 else None
            case "yarn":
                return YarnScaling(
                    factor=factor,
                    original_context_length=int(
                        self._model_value("rope.scaling.original_context_length", context_length)
                    ),
                    attention_factor=yarn_attention_factor(factor)
                    * float(self._model_value("rope.scaling.attn_factor", 1.0)),
                    beta_fast=float(self._model_value("rope.scaling.yarn_beta_fast", 32.0)),
                    beta_slow=float(self._model_value("rope.scaling.yarn_beta_slow", 1.0)),
                )
            case _:
                raise UnsupportedModel(
                    f"{self._path}: rope scaling {kind} is not supported; supported are none, linear and yarn"
                )

    def _check_tensors(self) -> None:
        wanted = self.description.tensor_shapes()
        for name, shape in wanted.items():
            tensor = self._tensors.get(name)
            if tensor is None:
                raise UnreadableCheckpoint(f"{self._path}: tensor {name} is missing; is the file one part of several?")
            found = tuple(int(n) for n in reversed(tensor.shape))
            if found != shape:
                raise UnreadableCheckpoint(
                    f"{self._path}: tensor {tensor.name} has shape {list(found)}, the keys ask for {list(shape)}"
                )
        for name in self._tensors:
            if name not in wanted:
                raise UnreadableCheckpoint(
                    f"{self._path}: tensor {name} lies beyond block_count {self.description.num_layers}"
                )

    def _read_tokenizer(self) -> TokenizerDescription:
        kind = self._value("tokenizer.ggml.model")
        tokens: list[str] | None = self._value("tokenizer.ggml.tokens")
        if not tokens:
            raise UnreadableCheckpoint(f"{self._path} has no tokenizer (tokenizer.ggml.tokens); use a complete file")
        types: list[int] = self._value("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
        bos = self._value("tokenizer.ggml.bos_token_id")
        eos = self._value("tokenizer.ggml.eos_token_id")
        match kind:
            case "gpt2":
                pre = pre_tokenizer(self._value("tokenizer.ggml.pre", "default"), str(self._path))
                merges = self._value("tokenizer.ggml.merges", [])
                self.tokenizer_files["tokenizer.json"] = byte_level_json(tokens, merges, types, pre)
                default_bos = pre.adds_bos
                is_llama2 = False
            case "llama":
                if UNKNOWN not in types:
                    types = [UNKNOWN if index == 0 else value for index, value in enumerate(types)]
                data = sentencepiece_model(
                    tokens,
                    self._value("tokenizer.ggml.scores", [0.0] * len(tokens)),
                    types,
                    bos_token_id=bos,
                    eos_token_id=eos,
                    add_space_prefix=bool(self._value("tokenizer.ggml.add_space_prefix", True)),
                )
                self.tokenizer_files["tokenizer.model"] = data
                default_bos = True
                is_llama2 = sentencepiece_tokens(data, str(self._path)).is_llama2
            case _:
                raise UnsupportedModel(
                    f"{self._path}: tokenizer {kind} is not supported; supported are gpt2 (byte-level BPE) and llama "
                    "(SentencePiece)"
                )
        template = self._value("tokenizer.chat_template")
        chat_format: ChatFormat = chat_format_without_template(is_llama2)
        if template:
            self.tokenizer_files["chat_template.jinja"] = template.encode()
            chat_format = "template"
        # A model that writes BOS has begun another text.
        stops = {self._value(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")}
        stops |= {index for index, text in enumerate(tokens) if types[index] == CONTROL and text in _END_OF_TURN}
        return TokenizerDescription(
            bos_token_id=bos,
            eos_token_id=eos,
            stop_token_ids=tuple(sorted(int(stop) for stop in stops if stop is not None)),
            add_bos=bool(self._value("tokenizer.ggml.add_bos_token", default_bos)) and bos is not None,
            chat_format=chat_format,
        )


class _FastReader(GGUFReader):  # type: ignore[misc]  # the package is untyped
    """Reads the vocabulary in a third of the time: the package takes a million slices, and memmap is slow at them."""

    @property
    def data(self) -> NDArray[np.uint8]:
        return self._data

    @data.setter
    def data(self, mapped: NDArray[np.uint8]) -> None:
        self._data = np.asarray(mapped)  # the same memory as a plain array


def _our_name(name: str, path: Path) -> str:
    if name == _ROPE_FACTORS:
        return "rope.factors"
    if name in _TENSORS:
        return _TENSORS[name]
    prefix, _, rest = name.removeprefix("blk.").partition(".")
    if name.startswith("blk.") and prefix.isdigit() and rest in _LAYER_TENSORS:
        return f"layers.{prefix}.{_LAYER_TENSORS[rest]}"
    raise UnsupportedModel(
        f"{path}: tensor {name} is not supported; supported are {', '.join(sorted([*_TENSORS, _ROPE_FACTORS]))} "
        f"and blk.N with {', '.join(sorted(_LAYER_TENSORS))}"
    )


def _dequantize_by_parts(data: NDArray[Any], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The package takes several arrays of the result's size; by parts they stay small beside it."""
    weight = np.empty(shape, dtype=np.float32)
    step = max(1, _VALUES_AT_ONCE // int(np.prod(shape[1:], dtype=np.int64)))
    for begin in range(0, shape[0], step):
        weight[begin : begin + step] = dequantize(data[begin : begin + step], kind)
    return weight


def _block_bytes(kind: GGMLQuantizationType) -> int:
    return int(GGML_QUANT_SIZES[kind][1])


def _pairs_to_halves(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo GGUF's order of rotary rows, head by head: (pair, 2) becomes (2, pair)."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)
