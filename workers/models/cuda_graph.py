"""A model description → the ONNX graphs of the CUDA flavour: the decoder over paged blocks, and the samplers behind it.

Decoder inputs, T tokens of B rows packed one behind the other:
  token_pool int64 [P]; token_sources int64 [T], each token's place in the pool: this is how a step feeds the next one
  without the host; cumulative_lengths int32 [B+1]; past_lengths int32 [B]; block_table int32 [B, M]; slots int32 [T],
  block * block_size + offset of each token's KV; attention_metadata int32 [3] in host memory: bounds on new tokens a
  row, on all tokens a row, and a lower bound on the longest row; logits_indices int64 [S], packed positions; key_{i},
  value_{i} [num_blocks, block_size, num_kv_heads, cache_head_dim], written in place; every weight by its stored name.
Decoder outputs: fed_ids int64 [T]; logits [S, vocab_size]; next_ids int64 [S], their argmax.

With our own operators (`Operators.FUSED`, engine/native/operators.c) one kernel rotates and stores a token, one gates
what a single product gave for gate and up, and one picks the likeliest token. The graph then takes positions int64
[T, 1] and, for PagedAttention, no_slots int32 [T], all -1: it stores nothing itself.

It comes in four kinds (`Decoder`), which differ in attention alone; DECODE and PREFIX have an attention of our own:
  STEP multiplies q, k and v at once and attends with PagedAttention. Without our operators it leaves the rotation to
  that, which makes the fewest kernels, and is for decode steps only; with them, it is for heads that our own attention
  (`has_own_attention`) is not made for.
  PROMPT is for prompts. With our own attention it takes tiles int32 [n, 2], a row and where in its piece a tile of
  `tile_tokens` tokens begins. Without our operators it multiplies and rotates q, k and v apart, for which it takes
  positions: PagedAttention's own rotation searches each token's row anew and took a tenth of a prefill (H200,
  2026-11-30).
  DECODE is a decode step with our own attention, which works in attention_room float32 [`attention_room`].
  PREFIX is a decode step of rows that begin alike, which our own attention reads once for all. It takes prefix_table
  int32 [n] and prefix_length int32 [1], the blocks that all begin with and their tokens; past_lengths and block_table
  leave these out.

Weights are inputs rather than initializers, so that sessions share them by pointer and a graph is a few kilobytes.
Activations, weights and cache all have one type: float16 or bfloat16.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from workers.models.description import CudaType, ModelDescription
from workers.models.errors import ArtifactError, UnsupportedModel
from workers.models.graph import (
    IR_VERSION,
    MICROSOFT,
    OPSET,
    GraphWriter,
    feed_forward,
    normalize,
    project,
    project_to_vocabulary,
)
from workers.models.weights import bfloat16_to_float32, float32_to_bfloat16

Value = tuple[str, int, Sequence[Any]]  # name, element type, shape
ONNX_TYPES: dict[CudaType, int] = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}

# The domain of our own operators, as engine/native/operators.c registers it.
OWN_DOMAIN = "promptmill"
# Queries that our own attention of prompts takes together: the heads of a tile's tokens that share a KV head.
_TILE_QUERIES = 128

# Candidates of a truncated distribution. A nucleus that holds more tokens than this is cut to the likeliest ones.
MAX_CANDIDATES = 256
# Alternatives that log probabilities are reported for, the most that the API allows.
MAX_LOGPROBS = 20
# The whole vocabulary is searched in two steps of about its square root, because CumSum costs the square of its length.
_CHUNK = 256
# An epsilon beside which the mean square of an activation vanishes in float32, and whose root float16 can hold.
_DWARFING = 2.0**30


class Decoder(Enum):
    """The kinds of decoder graph described at the top of this module."""

    STEP = "step"
    PROMPT = "prompt"
    DECODE = "decode"
    PREFIX = "prefix"


class Operators(Enum):
    """What a decoder graph is made of: ONNX Runtime's operators alone, or ours where they are faster."""

    STOCK = "stock"
    FUSED = "fused"


@dataclass
class CudaGraphWriter(GraphWriter):
    """A writer whose weights all have the type of the activations, so nothing is cast."""

    operators: Operators = field(default=Operators.STOCK, kw_only=True)

    def own(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        """Append one of our own operators, which exist once for each type."""
        return self.node(f"{op}_{self.dtype}", inputs, outputs, domain=OWN_DOMAIN, **attributes)

    def float32_weight(self, name: str) -> str:
        return self.weight(name)


def weight_shapes(description: ModelDescription, context_length: int) -> dict[str, tuple[int, ...]]:
    """Every weight the decoder takes as input, by stored name."""
    hidden, inner = description.hidden_size, description.intermediate_size
    half = description.cache_head_dim // 2
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (description.vocab_size, hidden),
        "norm.weight": (hidden,),
        "rope.cos": (context_length, half),
        "rope.sin": (context_length, half),
    }
    if not description.tie_word_embeddings:
        shapes["head.weight"] = (description.vocab_size, hidden)
    for layer in range(description.num_layers):
        at = f"layers.{layer}"
        shapes[f"{at}.attention_norm.weight"] = (hidden,)
        shapes[f"{at}.attention.qkv.weight"] = (description.query_size + 2 * description.kv_size, hidden)
        shapes[f"{at}.attention.output.weight"] = (hidden, description.query_size)
        shapes[f"{at}.mlp_norm.weight"] = (hidden,)
        shapes[f"{at}.mlp.gate_up.weight"] = (2 * inner, hidden)
        shapes[f"{at}.mlp.down.weight"] = (hidden, inner)
    return shapes


@dataclass(frozen=True)
class WeightPart:
    """A weight that is some rows of a merged one. whole: the merged one's name."""

    whole: str
    first_row: int
    shape: tuple[int, ...]


def weight_parts(description: ModelDescription) -> dict[str, WeightPart]:
    """The weights that `weight_shapes` has merged, by their own names."""
    hidden, inner = description.hidden_size, description.intermediate_size
    kv_size, query_size = description.kv_size, description.query_size
    merged: dict[str, dict[str, int]] = {
        "attention.qkv": {"attention.q": query_size, "attention.k": kv_size, "attention.v": kv_size},
        "mlp.gate_up": {"mlp.gate": inner, "mlp.up": inner},
    }
    parts: dict[str, WeightPart] = {}
    for layer in range(description.num_layers):
        for whole, names in merged.items():
            first_row = 0
            for name, rows in names.items():
                at = f"layers.{layer}"
                parts[f"{at}.{name}.weight"] = WeightPart(f"{at}.{whole}.weight", first_row, (rows, hidden))
                first_row += rows
    return parts


def has_own_attention(description: ModelDescription) -> bool:
    """Whether our own operators for attention are made for these heads."""
    return description.cache_head_dim in (64, 128) and description.num_heads // description.num_kv_heads <= 8


def tile_tokens(description: ModelDescription) -> int:
    """Tokens of a prompt that our own attention takes together."""
    return _TILE_QUERIES * description.num_kv_heads // description.num_heads


def attention_room(description: ModelDescription, rows: int, tokens: int) -> int:
    """How many numbers our own attention needs to work in, for steps of so many rows with room for so many tokens.

    One set for each segment of a row and KV head, of the lengths that engine/native/operators.c chooses: `MOST_SEGMENT`
    where the rows fill the device, else shorter ones until they do (`ENOUGH_BLOCKS`), which makes at most twice as many
    and one for each row.
    """
    row_heads = rows * description.num_kv_heads
    segments = max(row_heads * -(-tokens // 512), 2 * 512 + row_heads)
    group = description.num_heads // description.num_kv_heads
    return segments * group * (description.cache_head_dim + 2)


def uses_paged_attention(description: ModelDescription, kind: Decoder, operators: Operators) -> bool:
    """Whether a decoder attends with ONNX Runtime's operator, and takes cumulative_lengths and attention_metadata."""
    own = operators is Operators.FUSED and has_own_attention(description)
    return not own or kind is Decoder.STEP


def decoder_weights(
    description: ModelDescription, context_length: int, kind: Decoder, operators: Operators
) -> dict[str, tuple[int, ...]]:
    """The weights that a decoder of this kind takes as input, by name."""
    shapes = weight_shapes(description, context_length)
    if operators is Operators.STOCK:
        for name, part in weight_parts(description).items():
            if kind is not Decoder.STEP or ".mlp." in name:
                shapes.pop(part.whole, None)
                shapes[name] = part.shape
    return shapes


def stored_weights(
    entries: Mapping[str, TensorProto], folder: Path, dtype: CudaType
) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield every weight of an artifact as the bits of `dtype`, read by memory map, one at a time.

    entries: the initializers of its graph, pointing to external data in `folder`.
    Raises UnsupportedModel for quantized artifacts.
    """
    for name, entry in entries.items():
        if entry.data_location != TensorProto.EXTERNAL:
            continue  # a small constant of the CPU graph
        place = {item.key: item.value for item in entry.external_data}
        types: dict[int, Any] = {
            TensorProto.FLOAT: np.float32,
            TensorProto.FLOAT16: np.float16,
            TensorProto.BFLOAT16: np.uint16,
        }
        if entry.data_type not in types:
            raise UnsupportedModel(
                f"weight {name} is quantized, and the CUDA engine takes float weights; convert with --dtype {dtype}"
            )
        stored = np.memmap(
            folder / place["location"],
            dtype=types[entry.data_type],
            mode="r",
            offset=int(place["offset"]),
            shape=tuple(entry.dims),
        )
        yield name, _bits(name, stored, entry.data_type, dtype)


def artifact_entries(model_path: Path) -> dict[str, TensorProto]:
    """The weights that an artifact's graph names."""
    model = onnx.load(str(model_path), load_external_data=False)
    entries = {tensor.name: tensor for tensor in model.graph.initializer}
    if "embedding.weight" not in entries:
        raise ArtifactError(f"{model_path} has no embedding.weight; convert the model again")
    return entries


def build_decoder_graph(
    description: ModelDescription,
    dtype: CudaType,
    context_length: int,
    kind: Decoder = Decoder.STEP,
    operators: Operators = Operators.STOCK,
) -> ModelProto:
    """Build the decoder described at the top of this module. context_length: rows of the rotary tables."""
    is_fused = operators is Operators.FUSED
    shapes = decoder_weights(description, context_length, kind, operators)
    element = ONNX_TYPES[dtype]
    entries = {name: TensorProto(name=name, data_type=element, dims=shape) for name, shape in shapes.items()}
    graph = CudaGraphWriter(description, dtype, entries, operators=operators)
    fed_ids = graph.node("Gather", ["token_pool", "token_sources"], ["fed_ids"], axis=0)
    residual = graph.node("Gather", [graph.weight("embedding.weight"), fed_ids], ["embedding"], axis=0)
    update = ""
    for layer in range(description.num_layers):
        at = f"layers.{layer}"
        normed, residual = normalize(graph, residual, update, f"{at}.attention_norm")
        attended = _attend_in(graph, normed, layer, kind)
        update = project(graph, attended, f"{at}.attention.output")
        normed, residual = normalize(graph, residual, update, f"{at}.mlp_norm")
        if kind is Decoder.STEP and not is_fused:
            update = feed_forward(graph, normed, at)
        else:
            update = _feed_forward(graph, normed, at)
    # Only rows whose logits are asked for go through the last norm and the head.
    hidden = graph.node("Gather", [residual, "logits_indices"], ["hidden.selected"], axis=0)
    update = graph.node("Gather", [update, "logits_indices"], ["update.selected"], axis=0)
    normed, _ = normalize(graph, hidden, update, "norm")
    logits = project_to_vocabulary(graph, normed)
    if is_fused:
        graph.own("RowArgmax", [logits], ["next_ids"])
    else:
        if dtype == "bfloat16":  # ArgMax has no bfloat16 kernel
            logits = graph.node("Cast", [logits], ["logits.float32"], to=TensorProto.FLOAT)
        graph.node("ArgMax", [logits], ["next_ids"], axis=1, keepdims=0)

    inputs: list[Value] = [
        ("token_pool", TensorProto.INT64, ["pool"]),
        ("token_sources", TensorProto.INT64, ["tokens"]),
        ("past_lengths", TensorProto.INT32, ["rows"]),
        ("block_table", TensorProto.INT32, ["rows", "table_width"]),
        ("slots", TensorProto.INT32, ["tokens"]),
        ("logits_indices", TensorProto.INT64, ["num_logits"]),
        *_cache_values(description, element),
        *((name, element, list(shape)) for name, shape in shapes.items()),
    ]
    if kind is not Decoder.STEP or is_fused:
        inputs.append(("positions", TensorProto.INT64, ["tokens", 1]))
    is_paged = uses_paged_attention(description, kind, operators)
    if is_paged or kind is Decoder.PROMPT:
        inputs.append(("cumulative_lengths", TensorProto.INT32, ["rows_plus_1"]))
    if is_paged:
        inputs.append(("attention_metadata", TensorProto.INT32, [3]))
    elif kind is Decoder.PROMPT:
        inputs.append(("tiles", TensorProto.INT32, ["tiles", 2]))
    else:
        inputs.append(("attention_room", TensorProto.FLOAT, ["room"]))
    if kind is Decoder.PREFIX:
        inputs.append(("prefix_table", TensorProto.INT32, ["prefix_width"]))
        inputs.append(("prefix_length", TensorProto.INT32, [1]))
    if is_fused and is_paged:
        inputs.append(("no_slots", TensorProto.INT32, ["tokens"]))
    outputs: list[Value] = [
        ("fed_ids", TensorProto.INT64, ["tokens"]),
        ("logits", element, ["num_logits", description.vocab_size]),
        ("next_ids", TensorProto.INT64, ["num_logits"]),
    ]
    return _model(graph.nodes, inputs, outputs, [graph.used[name] for name in graph.used if name not in shapes])


def build_sampler_graph(dtype: CudaType | Literal["float32"], vocab_size: int, *, with_extras: bool) -> ModelProto:
    """Build the graph that draws the next token of each row from its logits, as `RowSampler` does.

    Inputs: logits [S, vocab_size]; float32 [S, 1]: inverse_temperature, top_p (1 keeps all), uniform in [0, 1); int64
    [S, 1]: top_k (vocab_size or more keeps all; 1 is greedy). With extras also: fed_ids int64 [S], fed_counts float32
    [S, 1], 1 where the token fed to this step counts for penalties and the host has not seen it yet; seen_ids int64
    [S, A], seen_counts float32 [S, A]; frequency_penalty, presence_penalty float32 [S, 1]; bias_ids int64 [S, C],
    bias_values float32 [S, C]. Unused places of a sparse pair hold id 0 with value 0.
    Outputs: next_ids int64 [S]; with extras also logprob float32 [S, 1], top_ids int64 and top_logprobs float32
    [S, MAX_LOGPROBS].

    A row that keeps everything is drawn over the whole vocabulary in the order of ids; a truncated one over its
    candidates, likeliest first: the order in which the CPU flavour adds them up.
    """
    graph = _SamplerWriter()
    kind = TensorProto.FLOAT if dtype == "float32" else ONNX_TYPES[dtype]
    column = ["rows", 1]
    inputs: list[Value] = [
        ("logits", kind, ["rows", vocab_size]),
        ("inverse_temperature", TensorProto.FLOAT, column),
        ("top_k", TensorProto.INT64, column),
        ("top_p", TensorProto.FLOAT, column),
        ("uniform", TensorProto.FLOAT, column),
    ]
    outputs: list[Value] = [("next_ids", TensorProto.INT64, ["rows"])]
    logits = graph.node("Cast", ["logits"], "logits.float32", to=TensorProto.FLOAT)
    if with_extras:
        logits = _add_extras(graph, logits)
        inputs += [
            ("fed_ids", TensorProto.INT64, ["rows"]),
            ("fed_counts", TensorProto.FLOAT, column),
            ("seen_ids", TensorProto.INT64, ["rows", "seen"]),
            ("seen_counts", TensorProto.FLOAT, ["rows", "seen"]),
            ("frequency_penalty", TensorProto.FLOAT, column),
            ("presence_penalty", TensorProto.FLOAT, column),
            ("bias_ids", TensorProto.INT64, ["rows", "biases"]),
            ("bias_values", TensorProto.FLOAT, ["rows", "biases"]),
        ]
        top = min(MAX_LOGPROBS, vocab_size)
        outputs += [
            ("logprob", TensorProto.FLOAT, column),
            ("top_ids", TensorProto.INT64, ["rows", top]),
            ("top_logprobs", TensorProto.FLOAT, ["rows", top]),
        ]
    chosen = _draw(graph, logits, vocab_size)
    graph.node("Reshape", [chosen, graph.ints("rows.flat", [-1])], "next_ids")
    if with_extras:
        logprobs = graph.node("LogSoftmax", [logits], "logprobs", axis=1)
        graph.node("GatherElements", [logprobs, chosen], "logprob", axis=1)
        graph.nodes.append(
            helper.make_node("TopK", [logprobs, graph.ints("top", [top])], ["top_logprobs", "top_ids"], axis=1)
        )
    return _model(graph.nodes, inputs, outputs, graph.constants)


_CACHES = ("key", "value")


def _cache_values(description: ModelDescription, element: int) -> list[Value]:
    shape: list[Any] = ["num_blocks", "block_size", description.num_kv_heads, description.cache_head_dim]
    return [(f"{part}_{layer}", element, shape) for layer in range(description.num_layers) for part in _CACHES]


def _attend_in(graph: CudaGraphWriter, normed: str, layer: int, kind: Decoder) -> str:
    """Attention of one layer: [T, hidden_size] → [T, query_size]."""
    at = f"layers.{layer}.attention"
    if graph.operators is Operators.FUSED:
        qkv = project(graph, normed, f"{at}.qkv")
        tables = [graph.weight("rope.cos"), graph.weight("rope.sin")]
        query, stored = f"{at}.query", f"{at}.stored"
        graph.own(
            "RotateAppend",
            [qkv, "positions", "slots", *tables, f"key_{layer}", f"value_{layer}"],
            [query, stored],
        )
        if not uses_paged_attention(graph.description, kind, graph.operators):
            return _attend_alone(graph, query, layer, kind)
        rows = ("cumulative_lengths", "past_lengths", "block_table", "no_slots", "attention_metadata")
        return _attend_paged(graph, [query, stored, stored], layer, at, do_rotary=0, rows=rows)
    if kind is Decoder.STEP:
        qkv = project(graph, normed, f"{at}.qkv")
        return _attend_paged(graph, [qkv, "", ""], layer, at, do_rotary=1)
    query = _rotate(graph, project(graph, normed, f"{at}.q"), graph.description.query_size)
    key = _rotate(graph, project(graph, normed, f"{at}.k"), graph.description.kv_size)
    value = project(graph, normed, f"{at}.v")
    return _attend_paged(graph, [query, key, value], layer, at, do_rotary=0)


def _attend_alone(graph: CudaGraphWriter, query: str, layer: int, kind: Decoder) -> str:
    """Attention by our own operators, after the tokens themselves are stored."""
    description = graph.description
    at = f"layers.{layer}.attention"
    scale = 1 / math.sqrt(description.head_dim)
    inputs = [query, f"key_{layer}", f"value_{layer}", "block_table", "past_lengths"]
    if kind is Decoder.PROMPT:
        return graph.own("AttendPrompt", [*inputs, "cumulative_lengths", "tiles"], [at], scale=scale)
    inputs.append("attention_room")
    if kind is Decoder.DECODE:
        return graph.own("Attend", inputs, [at], scale=scale)
    answer, weight = f"{at}.prefix_answer", f"{at}.prefix_weight"
    shared = [query, f"key_{layer}", f"value_{layer}", "prefix_table", "prefix_length"]
    graph.own("AttendShared", shared, [answer, weight], scale=scale)
    return graph.own("AttendPrefixed", [*inputs, answer, weight], [at], scale=scale)


def _attend_paged(
    graph: GraphWriter,
    values: list[str],
    layer: int,
    output: str,
    *,
    do_rotary: int,
    rows: tuple[str, ...] = ("cumulative_lengths", "past_lengths", "block_table", "slots", "attention_metadata"),
) -> str:
    """values: query, key and value, or all three in the first. rows: where each row's context lies."""
    description = graph.description
    *context, slots, metadata = rows
    tables = [graph.weight("rope.cos"), graph.weight("rope.sin")] if do_rotary else ["", ""]
    # Inputs 11 to 15 are not used. Without the cache outputs the operator writes through its cache inputs.
    return graph.node(
        "PagedAttention",
        [
            *values,
            *(f"key_{layer}", f"value_{layer}", *context),
            *tables,
            *(slots, "", "", "", "", "", metadata),
        ],
        [output],
        domain=MICROSOFT,
        num_heads=description.num_heads,
        kv_num_heads=description.num_kv_heads,
        scale=1 / math.sqrt(description.head_dim),
        do_rotary=do_rotary,
        rotary_interleaved=0,
    )


def _feed_forward(graph: CudaGraphWriter, normed: str, at: str) -> str:
    """The feed-forward part, silu(gate) * up in one kernel: [T, hidden_size] → [T, hidden_size].

    Without our own operator: GatedRMSNorm is x / sqrt(mean(x^2) + epsilon) * scale * silu(gate), in float32. An epsilon
    that dwarfs the mean leaves x / sqrt(epsilon), and the scale takes that back: exact where mean(up^2) < 64, else off
    by mean / 2^31. It moves the activations once less than QuickGelu and Mul; for few rows those are faster (H200, 8
    rows: 3 % of a step). The whole row is one group: smaller ones are slower (H200, 8192 x 11008: 0.36 ms; halves 0.44,
    128s 0.59; QuickGelu and Mul 0.38).
    """
    if graph.operators is Operators.FUSED:
        both = project(graph, normed, f"{at}.mlp.gate_up")
        return project(graph, graph.own("GatedProduct", [both], [f"{at}.mlp.gated"]), f"{at}.mlp.down")
    gate = project(graph, normed, f"{at}.mlp.gate")
    up = project(graph, normed, f"{at}.mlp.up")
    scale = _scales(graph, "mlp.scale", graph.description.intermediate_size, math.sqrt(_DWARFING))
    gated = graph.node(
        "GatedRMSNorm",
        [up, scale, gate],
        [f"{at}.mlp.gated"],
        domain=MICROSOFT,
        activation="silu",
        epsilon=_DWARFING,
    )
    return project(graph, gated, f"{at}.mlp.down")


def _rotate(graph: GraphWriter, values: str, size: int) -> str:
    """Turn the heads of [T, size] by their positions; each token is a sequence of its own to the operator."""
    single = graph.node("Reshape", [values, _constant(graph, f"single.{size}", [-1, 1, size])], [f"{values}.single"])
    tables = [graph.weight("rope.cos"), graph.weight("rope.sin")]
    rotated = graph.node(
        "RotaryEmbedding", [single, "positions", *tables], [f"{values}.turned"], domain=MICROSOFT, interleaved=0
    )
    return graph.node("Reshape", [rotated, _constant(graph, f"flat.{size}", [-1, size])], [f"{values}.rotated"])


def _constant(graph: GraphWriter, name: str, values: list[int]) -> str:
    return name if name in graph.used else graph.constant(name, values)


def _scales(graph: GraphWriter, name: str, count: int, value: float) -> str:
    """A vector of one value, in the type of the activations."""
    if name not in graph.used:
        values = np.full(count, value, dtype=np.float32)
        bits = values.astype(np.float16).view(np.uint16) if graph.dtype == "float16" else float32_to_bfloat16(values)
        kind = ONNX_TYPES[_cuda_type(graph)]
        graph.used[name] = TensorProto(name=name, data_type=kind, dims=[count], raw_data=bits.tobytes())
    return name


def _cuda_type(graph: GraphWriter) -> CudaType:
    assert graph.dtype == "float16" or graph.dtype == "bfloat16"
    return graph.dtype


@dataclass
class _SamplerWriter:
    nodes: list[NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)

    def node(self, op: str, inputs: list[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], name=output, **attributes))
        return output

    def ints(self, name: str, values: list[int]) -> str:
        return self._constant(name, np.asarray(values, dtype=np.int64))

    def floats(self, name: str, values: list[float]) -> str:
        return self._constant(name, np.asarray(values, dtype=np.float32))

    def count(self, condition: str, name: str) -> str:
        """How many elements of each row hold: int64 [S, 1]."""
        ones = self.node("Cast", [condition], f"{name}.ones", to=TensorProto.FLOAT)
        total = self.node("ReduceSum", [ones, self.ints(f"{name}.axis", [1])], f"{name}.total", keepdims=1)
        return self.node("Cast", [total], name, to=TensorProto.INT64)

    def slice(self, values: str, start: int, end: int, name: str) -> str:
        """Columns from start to end of [S, n]."""
        ends = [self.ints(f"{name}.start", [start]), self.ints(f"{name}.end", [end])]
        return self.node("Slice", [values, *ends, self.ints(f"{name}.axis", [1])], name)

    def _constant(self, name: str, values: NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(values, name))
        return name


def _add_extras(graph: _SamplerWriter, logits: str) -> str:
    """Apply bias and penalties: logit - count * frequency_penalty - (count > 0) * presence_penalty."""
    logits = graph.node(
        "ScatterElements", [logits, "bias_ids", "bias_values"], "logits.biased", axis=1, reduction="add"
    )
    zeros = graph.node("Mul", [logits, graph.floats("zero", [0.0])], "counts.zero")
    seen = graph.node("ScatterElements", [zeros, "seen_ids", "seen_counts"], "counts.seen", axis=1, reduction="add")
    fed = graph.node("Unsqueeze", ["fed_ids", graph.ints("fed.axis", [1])], "fed.column")
    counts = graph.node("ScatterElements", [seen, fed, "fed_counts"], "counts", axis=1, reduction="add")
    present = graph.node("Greater", [counts, "zero"], "present")
    present = graph.node("Cast", [present], "present.float32", to=TensorProto.FLOAT)
    by_count = graph.node("Mul", [counts, "frequency_penalty"], "penalty.frequency")
    by_presence = graph.node("Mul", [present, "presence_penalty"], "penalty.presence")
    penalty = graph.node("Add", [by_count, by_presence], "penalty")
    return graph.node("Sub", [logits, penalty], "logits.adjusted")


def _draw(graph: _SamplerWriter, logits: str, vocab_size: int) -> str:
    """The drawn token of each row: int64 [S, 1]."""
    candidates = min(MAX_CANDIDATES, vocab_size)
    graph.nodes.append(
        helper.make_node("TopK", [logits, graph.ints("candidates", [candidates])], ["best", "best_ids"], axis=1)
    )
    largest = graph.slice("best", 0, 1, "largest")

    def weigh(values: str, name: str) -> str:
        shifted = graph.node("Sub", [values, largest], f"{name}.shifted")
        scaled = graph.node("Mul", [shifted, "inverse_temperature"], f"{name}.scaled")
        return graph.node("Exp", [scaled], name)

    weights = weigh(logits, "weights")
    everything = _draw_from_all(graph, weights, vocab_size)
    truncated = _draw_from_candidates(graph, weigh("best", "best_weights"), weights, candidates)
    keeps_all_k = graph.node("GreaterOrEqual", ["top_k", graph.ints("vocab", [vocab_size])], "keeps_all_k")
    keeps_all_p = graph.node("GreaterOrEqual", ["top_p", graph.floats("one", [1.0])], "keeps_all_p")
    keeps_all = graph.node("And", [keeps_all_k, keeps_all_p], "keeps_all")
    return graph.node("Where", [keeps_all, everything, truncated], "chosen")


def _draw_from_candidates(graph: _SamplerWriter, best: str, weights: str, candidates: int) -> str:
    """Top-k, then the nucleus of what is left, then a draw; best: [S, candidates], falling."""
    ranks = graph.ints("ranks", list(range(candidates)))
    in_top_k = graph.node("Less", [ranks, "top_k"], "in_top_k")
    zero = graph.floats("zero.weight", [0.0])
    best = graph.node("Where", [in_top_k, best, zero], "best.top_k")
    axis = graph.ints("mass.axis", [1])
    mass_of_all = graph.node("ReduceSum", [weights, axis], "mass.all", keepdims=1)
    mass_of_top = graph.node("ReduceSum", [best, axis], "mass.top", keepdims=1)
    keeps_more = graph.node("Greater", ["top_k", graph.ints("candidates.k", [candidates])], "keeps_more")
    mass = graph.node("Where", [keeps_more, mass_of_all, mass_of_top], "mass")
    wanted = graph.node("Mul", [mass, "top_p"], "mass.wanted")
    last = graph.ints("candidates.axis", [1])
    before = graph.node("CumSum", [best, last], "mass.before", exclusive=1)
    in_nucleus = graph.node("Less", [before, wanted], "in_nucleus")
    kept = graph.node("Where", [in_nucleus, best, zero], "best.kept")
    cumulative = graph.node("CumSum", [kept, last], "mass.cumulative")
    total = graph.slice(cumulative, candidates - 1, candidates, "mass.kept")
    threshold = graph.node("Mul", [total, "uniform"], "threshold")
    passed = graph.count(graph.node("LessOrEqual", [cumulative, threshold], "passed"), "place.passed")
    # Rounding may carry a draw past the last token that has weight.
    has_weight = graph.count(graph.node("Greater", [kept, zero], "has_weight"), "place.kept")
    limit = graph.node("Sub", [has_weight, graph.ints("place.one", [1])], "place.limit")
    place = graph.node("Min", [passed, limit], "place")
    return graph.node("GatherElements", ["best_ids", place], "chosen.truncated", axis=1)


def _draw_from_all(graph: _SamplerWriter, weights: str, vocab_size: int) -> str:
    """A draw over the vocabulary in the order of ids: first the chunk, then the place in it."""
    chunks = -(-vocab_size // _CHUNK)
    fill = chunks * _CHUNK - vocab_size
    if fill:
        weights = graph.node("Pad", [weights, graph.ints("fill", [0, 0, 0, fill])], "weights.filled")
    chunked = graph.node("Reshape", [weights, graph.ints("chunked.shape", [-1, chunks, _CHUNK])], "chunked")
    masses = graph.node("ReduceSum", [chunked, graph.ints("chunked.axis", [2])], "chunk.mass", keepdims=0)
    axis = graph.ints("all.axis", [1])
    cumulative = graph.node("CumSum", [masses, axis], "chunk.cumulative")
    before = graph.node("CumSum", [masses, axis], "chunk.before", exclusive=1)
    total = graph.slice(cumulative, chunks - 1, chunks, "chunk.total")
    threshold = graph.node("Mul", [total, "uniform"], "chunk.threshold")
    passed = graph.count(graph.node("LessOrEqual", [cumulative, threshold], "chunk.passed"), "chunk.count")
    chunk = graph.node("Min", [passed, graph.ints("chunk.last", [chunks - 1])], "chunk")
    rest = graph.node("Sub", [threshold, graph.node("GatherElements", [before, chunk], "chunk.begin", axis=1)], "rest")
    column = graph.node("Unsqueeze", [chunk, graph.ints("chunk.axis", [2])], "chunk.column")
    indices = graph.node("Expand", [column, graph.ints("chunk.width", [1, 1, _CHUNK])], "chunk.indices")
    inner = graph.node("GatherElements", [chunked, indices], "inner", axis=1)
    inner = graph.node("Reshape", [inner, graph.ints("inner.shape", [-1, _CHUNK])], "inner.flat")
    inner = graph.node("CumSum", [inner, axis], "inner.cumulative")
    passed = graph.count(graph.node("LessOrEqual", [inner, rest], "inner.passed"), "inner.count")
    place = graph.node("Min", [passed, graph.ints("inner.last", [_CHUNK - 1])], "inner.place")
    start = graph.node("Mul", [chunk, graph.ints("chunk.size", [_CHUNK])], "chunk.start")
    token = graph.node("Add", [start, place], "token")
    return graph.node("Min", [token, graph.ints("token.last", [vocab_size - 1])], "chosen.all")


def _bits(name: str, stored: NDArray[Any], kind: int, dtype: CudaType) -> NDArray[np.uint16]:
    if kind == ONNX_TYPES[dtype]:
        return stored.view(np.uint16)
    values = bfloat16_to_float32(stored) if kind == TensorProto.BFLOAT16 else stored.astype(np.float32)
    if dtype == "bfloat16":
        return float32_to_bfloat16(values)
    if np.abs(values).max() > np.finfo(np.float16).max:
        raise UnsupportedModel(f"weight {name} exceeds the range of float16; convert with --dtype bfloat16")
    return values.astype(np.float16).view(np.uint16)


def _model(
    nodes: list[NodeProto],
    inputs: list[Value],
    outputs: list[Value],
    constants: list[TensorProto],
) -> ModelProto:
    graph = helper.make_graph(
        nodes,
        "promptmill",
        [helper.make_tensor_value_info(*value) for value in inputs],
        [helper.make_tensor_value_info(*value) for value in outputs],
        initializer=constants,
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1), helper.make_opsetid(OWN_DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="promptmill")
