"""What a model is, apart from its weights: dimensions, rotary positions, tokenizer facts.

Plain frozen values that go to and from the manifest's JSON. Readers fill them from a checkpoint, the graph is built
from them, the engine sizes its KV cache by them. They know nothing of files or of ONNX.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from workers.models.errors import UnreadableCheckpoint, UnsupportedModel

DType = Literal["float32", "float16", "bfloat16", "int8", "int4"]
CudaType = Literal["float16", "bfloat16"]  # of weights, activations and cache on a GPU
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16", "int8", "int4")

# GroupQueryAttention with rotary positions takes heads of whole sixteens.
HEAD_DIM_MULTIPLE = 16

ChatFormat = Literal["template", "llama2", "plain"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by factor."""

    factor: float
    kind: Literal["linear"] = "linear"


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by factor, high ones kept, a smooth step between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int
    kind: Literal["llama3"] = "llama3"


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolate low frequencies, keep high ones, cos and sin times attention_factor."""

    factor: float
    original_context_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    kind: Literal["yarn"] = "yarn"


@dataclass(frozen=True)
class FrequencyFactors:
    """One divisor for each rotary frequency, as GGUF stores Llama 3's scaling (`rope_freqs.weight`)."""

    factors: tuple[float, ...]
    kind: Literal["factors"] = "factors"


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors

_SCALINGS: dict[str, type[RopeScaling]] = {
    "linear": LinearScaling,
    "llama3": Llama3Scaling,
    "yarn": YarnScaling,
    "factors": FrequencyFactors,
}


@dataclass(frozen=True)
class ModelDescription:
    """A Llama-family decoder. vocab_size: rows of the embedding, which may be more than the tokenizer knows."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool

    @property
    def cache_head_dim(self) -> int:
        """Channels of a head in the graph and the KV cache: head_dim, filled up with zeros to what the kernels take."""
        return -(-self.head_dim // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE

    @property
    def query_size(self) -> int:
        """Channels of all query heads in the graph."""
        return self.num_heads * self.cache_head_dim

    @property
    def kv_size(self) -> int:
        """Channels of all key (or value) heads in the graph."""
        return self.num_kv_heads * self.cache_head_dim

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor a checkpoint must offer, by name."""
        shapes: dict[str, tuple[int, ...]] = {
            "embedding.weight": (self.vocab_size, self.hidden_size),
            "norm.weight": (self.hidden_size,),
        }
        if not self.tie_word_embeddings:
            shapes["head.weight"] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            at = f"layers.{layer}"
            shapes[f"{at}.attention_norm.weight"] = (self.hidden_size,)
            shapes[f"{at}.attention.q.weight"] = (self.num_heads * self.head_dim, self.hidden_size)
            shapes[f"{at}.attention.k.weight"] = (self.num_kv_heads * self.head_dim, self.hidden_size)
            shapes[f"{at}.attention.v.weight"] = (self.num_kv_heads * self.head_dim, self.hidden_size)
            shapes[f"{at}.attention.output.weight"] = (self.hidden_size, self.num_heads * self.head_dim)
            shapes[f"{at}.mlp_norm.weight"] = (self.hidden_size,)
            shapes[f"{at}.mlp.gate.weight"] = (self.intermediate_size, self.hidden_size)
            shapes[f"{at}.mlp.up.weight"] = (self.intermediate_size, self.hidden_size)
            shapes[f"{at}.mlp.down.weight"] = (self.hidden_size, self.intermediate_size)
        return shapes

    def check(self, where: str) -> None:
        """Refuse dimensions that the graph cannot have. where: the file they came from, for messages."""
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, int | float) and not isinstance(value, bool) and value <= 0:
                raise UnreadableCheckpoint(f"{where}: {name} {value} must be above 0")
        if self.num_heads % self.num_kv_heads:
            raise UnreadableCheckpoint(
                f"{where}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise UnsupportedModel(f"{where}: head_dim {self.head_dim} is not supported; it must be even")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ModelDescription":
        """Raises TypeError or KeyError where a field is missing or unknown."""
        fields = dict(values)
        scaling = fields.pop("rope_scaling")
        if scaling is not None:
            scaling = dict(scaling)
            if "factors" in scaling:
                scaling["factors"] = tuple(scaling["factors"])
            scaling = _SCALINGS[scaling["kind"]](**scaling)
        return cls(rope_scaling=scaling, **fields)


@dataclass(frozen=True)
class TokenizerDescription:
    """What the tokenizer's own file does not say.

    stop_token_ids: every id that ends an answer, sorted. add_bos: whether plain text gets a BOS token in front.
    added_tokens: text to id for special tokens that a SentencePiece file does not hold.
    """

    bos_token_id: int | None
    eos_token_id: int | None
    stop_token_ids: tuple[int, ...]
    add_bos: bool
    chat_format: ChatFormat
    added_tokens: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "TokenizerDescription":
        """Raises TypeError or KeyError where a field is missing or unknown."""
        fields = dict(values)
        return cls(stop_token_ids=tuple(fields.pop("stop_token_ids")), **fields)


@dataclass(frozen=True)
class Quantization:
    """How a weight is cut into integer blocks along its inputs.

    shares_row_scale: all blocks of an output have one scale, so that the same integers serve a plain integer product.
    """

    bits: Literal[4, 8]
    block_size: int
    shares_row_scale: bool = False


def quantization_of(weight: str, dtype: DType) -> Quantization | None:
    """How an artifact of the given type stores a weight; None for norms and in float types.

    The embedding and the head stay at eight bits even in int4: they decide every token and are read once. Blocks of 128
    are a tenth faster, but their kernel adds up in another order for one row than for many, and a last bit that differs
    moves a rounding and then every logit (measured: 0.4 standard deviations). With blocks of up to 64 a row's logits
    are the same to the last bit whatever rows are beside it. SmolLM2-135M against float32, 2026-11-30, KL divergence a
    token: int8 of block 64 0.0057, 0.0077 by the AMX graph; int4 of block 32 0.22, of 64 0.28.

    The int8 weights that read normed or attended activations share a scale in each row, for the AMX graph (`graph.py`).
    That of down does not: its input has the loudest channels, and by whole rows it alone costs as much as the rest.
    """
    if dtype not in ("int8", "int4") or "norm" in weight:
        return None
    if not weight.startswith("layers."):
        return Quantization(bits=8, block_size=64)
    if dtype == "int4":
        return Quantization(bits=4, block_size=32)
    return Quantization(bits=8, block_size=64, shares_row_scale=not weight.endswith("mlp.down.weight"))
