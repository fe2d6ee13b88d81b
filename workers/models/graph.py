"""A model description and its stored weights → the ONNX graph for the CPU, written node by node.

Inputs: input_ids int64 [batch_size, sequence_length], right-padded; seqlens_k int32 [batch_size], each row's total
length minus 1; total_sequence_length int32 []; logits_indices int64 [num_logits], flat positions in batch_size *
sequence_length; past_key_{i}, past_value_{i} float32 [batch_size, num_kv_heads, cache_length, cache_head_dim].
Outputs: logits float32 [num_logits, vocab_size]; present_key_{i}, present_value_{i}, to be bound to the memory of the
past.

There is a second graph over the same weights for int8 on processors with AMX: where all blocks of a row share a scale,
the product is one of plain integers (activations rounded row by row), which ONNX Runtime runs on AMX tiles; its kernel
for MatMulNBits does not use them. SmolLM2-135M, two cores, 2026-11-30: prefill 2.1 times, 32-row decode 1.4 times as
fast, KL divergence a token from float32 0.0077 instead of 0.0057. On processors without VNNI the operator saturates, so
it is not for them.

The functions that make up a layer are the graph of every flavour but for attention and how a projection is multiplied.
Weights of 16 bits are cast to float32 by nodes that ONNX Runtime folds when it loads the graph.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

from workers.models.description import DType, ModelDescription, quantization_of
from workers.models.errors import ArtifactError

OPSET = 21
IR_VERSION = 10
MICROSOFT = "com.microsoft"
# MatMulNBits multiplies in int8 (activations are quantized by block): the only level that is fast on a CPU.
ACCURACY_LEVEL = 4

_NORMS = ("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization")


@dataclass
class GraphWriter:
    """Nodes in order, and which of the stored weights they use. for_amx: multiply integers where the weights allow."""

    description: ModelDescription
    dtype: DType
    weights: Mapping[str, TensorProto]
    for_amx: bool = field(default=False, kw_only=True)
    nodes: list[NodeProto] = field(default_factory=list)
    used: dict[str, TensorProto] = field(default_factory=dict)

    def node(self, op: str, inputs: list[str], outputs: list[str], domain: str = "", **attributes: Any) -> str:
        """Append a node named after its first output, and return that output."""
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def weight(self, name: str) -> str:
        """Use a stored weight as it is."""
        self.used[name] = self.weights[name]
        return name

    def float32_weight(self, name: str) -> str:
        """Use a stored weight as float32."""
        self.weight(name)
        if self.weights[name].data_type == TensorProto.FLOAT:
            return name
        return self.node("Cast", [name], [f"{name}.float32"], to=TensorProto.FLOAT)

    def constant(self, name: str, values: list[int]) -> str:
        """Add a small int64 vector to the graph itself."""
        return self.array(name, np.asarray(values, dtype=np.int64))

    def array(self, name: str, values: NDArray[Any]) -> str:
        """Add a small array to the graph itself."""
        self.used[name] = numpy_helper.from_array(values, name)
        return name

    def has(self, name: str) -> bool:
        """Whether a node already gives this output."""
        return any(name in node.output for node in reversed(self.nodes))


def write_graph(
    description: ModelDescription,
    dtype: DType,
    weights: Mapping[str, TensorProto],
    path: Path,
    *,
    for_amx: bool = False,
) -> None:
    """Write model.onnx; the weights stay in the external-data file that their entries name."""
    onnx.save_model(build_cpu_graph(description, dtype, weights, for_amx=for_amx), str(path))


def build_cpu_graph(
    description: ModelDescription, dtype: DType, weights: Mapping[str, TensorProto], *, for_amx: bool = False
) -> ModelProto:
    """Build the graph described at the top of this module."""
    graph = GraphWriter(description, dtype, weights, for_amx=for_amx)
    residual = _embed(graph, "input_ids")
    update = ""  # what the layer before adds to the residual
    for layer in range(description.num_layers):
        at = f"layers.{layer}"
        normed, residual = normalize(graph, residual, update, f"{at}.attention_norm")
        qkv = project(graph, normed, f"{at}.attention.qkv")
        attended = _attend(graph, qkv, layer)
        update = project(graph, attended, f"{at}.attention.output")
        normed, residual = normalize(graph, residual, update, f"{at}.mlp_norm")
        update = feed_forward(graph, normed, at)
    hidden = _select_rows(graph, residual, "logits_indices")
    update = _select_rows(graph, update, "logits_indices")
    normed, _ = normalize(graph, hidden, update, "norm")
    project_to_vocabulary(graph, normed)
    return _model(graph)


def read_epsilon(model_path: Path) -> float:
    """Return the RMSNorm epsilon that the written graph computes with.

    Raises ArtifactError where its norms disagree, or there are none.
    """
    model = onnx.load(str(model_path), load_external_data=False)
    found = {
        attribute.f
        for node in model.graph.node
        if node.op_type in _NORMS
        for attribute in node.attribute
        if attribute.name == "epsilon"
    }
    if len(found) != 1:
        raise ArtifactError(
            f"{model_path}: the norms hold {len(found)} different epsilons, wanted one: {sorted(found)}"
        )
    return float(found.pop())


def _embed(graph: GraphWriter, token_ids: str) -> str:
    quantization = quantization_of("embedding.weight", graph.dtype)
    if quantization is None:
        rows = graph.node("Gather", [graph.weight("embedding.weight"), token_ids], ["embedding.rows"], axis=0)
        if graph.weights["embedding.weight"].data_type == TensorProto.FLOAT:
            return rows
        return graph.node("Cast", [rows], ["embedding"], to=TensorProto.FLOAT)
    rows = graph.node(
        "GatherBlockQuantized",
        [graph.weight("embedding.weight"), token_ids, graph.weight("embedding.weight.scales")],
        ["embedding.rows"],
        domain=MICROSOFT,
        bits=quantization.bits,
        block_size=quantization.block_size,
        gather_axis=0,
        quantize_axis=1,
    )
    hidden_size = graph.description.hidden_size
    if hidden_size % quantization.block_size == 0:
        return rows
    # The last block of each row is filled up; cut the fill off.
    ends = [graph.constant("embedding.begin", [0]), graph.constant("embedding.end", [hidden_size])]
    return graph.node("Slice", [rows, *ends, graph.constant("embedding.axis", [-1])], ["embedding"])


def normalize(graph: GraphWriter, residual: str, update: str, name: str) -> tuple[str, str]:
    """Add the update to the residual and normalize; returns both. The first layer has no update yet."""
    gain = graph.float32_weight(f"{name}.weight")
    epsilon = graph.description.rms_norm_epsilon
    if not update:
        return graph.node(_NORMS[0], [residual, gain], [name], axis=-1, epsilon=epsilon, stash_type=1), residual
    # Outputs 1 and 2 are mean and deviation, which nobody reads.
    graph.node(
        _NORMS[1], [residual, update, gain], [name, "", "", f"{name}.residual"], domain=MICROSOFT, epsilon=epsilon
    )
    return name, f"{name}.residual"


def project(graph: GraphWriter, values: str, name: str, output: str = "") -> str:
    """Multiply [..., in] by a weight stored as [out, in]."""
    weight = f"{name}.weight"
    quantization = quantization_of(weight, graph.dtype)
    if quantization is None:
        return graph.node(
            "FusedMatMul", [values, graph.float32_weight(weight)], [output or name], domain=MICROSOFT, transB=1
        )
    rows, columns = _projection_shape(graph.description, name)
    if graph.for_amx and quantization.shares_row_scale:
        return _project_integers(graph, values, name, rows, columns)
    return graph.node(
        "MatMulNBits",
        [values, graph.weight(weight), graph.weight(f"{weight}.scales")],
        [output or name],
        domain=MICROSOFT,
        N=rows,
        K=columns,
        bits=quantization.bits,
        block_size=quantization.block_size,
        accuracy_level=ACCURACY_LEVEL,
    )


def _project_integers(graph: GraphWriter, values: str, name: str, rows: int, columns: int) -> str:
    """The same product with activations rounded to eight bits row by row: integers times integers, then both scales.

    Each row is divided by its largest magnitude, so one constant scale serves all; the magnitude comes back at the end.
    """
    step = graph.array("activation.step", np.array(1 / 127, dtype=np.float32))
    center = graph.array("activation.center", np.array(128, dtype=np.uint8))
    largest, rounded = f"{values}.largest", f"{values}.rounded"
    if not graph.has(rounded):  # gate and up read the same activations
        magnitudes = graph.node("Abs", [values], [f"{values}.magnitudes"])
        found = graph.node(
            "ReduceMax", [magnitudes, graph.constant("last_axis", [-1])], [f"{values}.found"], keepdims=1
        )
        # A row of zeros stays zeros rather than becoming no number.
        graph.node("Max", [found, graph.array("activation.least", np.array(1e-30, dtype=np.float32))], [largest])
        divided = graph.node("Div", [values, largest], [f"{values}.divided"])
        graph.node("QuantizeLinear", [divided, step, center], [rounded])
    integers, scales = _signed_columns(graph, name, rows, columns)
    product = graph.node(
        "MatMulIntegerToFloat", [rounded, integers, step, scales, center], [f"{name}.product"], domain=MICROSOFT
    )
    return graph.node("Mul", [product, largest], [name])


def _signed_columns(graph: GraphWriter, name: str, rows: int, columns: int) -> tuple[str, str]:
    """Stored blocks as int8 [in, out], and one scale for each output; ONNX Runtime folds these nodes at load."""
    weight = f"{name}.weight"
    flat = graph.node(
        "Reshape", [graph.weight(weight), graph.constant(f"{name}.shape", [rows, -1])], [f"{weight}.flat"]
    )
    ends = [graph.constant("weight.begin", [0]), graph.constant(f"{name}.end", [columns])]
    inputs = graph.node("Slice", [flat, *ends, graph.constant("last_axis", [-1])], [f"{weight}.inputs"])
    # 128 away is the highest bit turned over. In bytes, because folding wider integers takes three times as long.
    sign = graph.array("weight.sign", np.array(128, dtype=np.uint8))
    flipped = graph.node("BitwiseXor", [inputs, sign], [f"{weight}.flipped"])
    narrow = graph.node("Cast", [flipped], [f"{weight}.signed"], to=TensorProto.INT8)
    turned = graph.node("Transpose", [narrow], [f"{weight}.turned"], perm=[1, 0])
    first = graph.array("weight.first", np.array(0, dtype=np.int64))
    scales = graph.node("Gather", [graph.weight(f"{weight}.scales"), first], [f"{weight}.row_scales"], axis=1)
    return turned, scales


def _attend(graph: GraphWriter, qkv: str, layer: int) -> str:
    description = graph.description
    cache = ["past_key", "past_value", "present_key", "present_value"]
    past_key, past_value, present_key, present_value = (f"{name}_{layer}" for name in cache)
    name = f"layers.{layer}.attention"
    tables = [graph.weight("rope.cos"), graph.weight("rope.sin")]
    return graph.node(
        "GroupQueryAttention",
        [qkv, "", "", past_key, past_value, "seqlens_k", "total_sequence_length", *tables],
        [name, present_key, present_value],
        domain=MICROSOFT,
        num_heads=description.num_heads,
        kv_num_heads=description.num_kv_heads,
        scale=1 / math.sqrt(description.head_dim),
        do_rotary=1,
        rotary_interleaved=0,
    )


def feed_forward(graph: GraphWriter, values: str, at: str) -> str:
    gate = project(graph, values, f"{at}.mlp.gate")
    up = project(graph, values, f"{at}.mlp.up")
    # QuickGelu with alpha 1 is SiLU, x * sigmoid(x), in one operator.
    activated = graph.node("QuickGelu", [gate], [f"{at}.mlp.activated"], domain=MICROSOFT, alpha=1.0)
    gated = graph.node("Mul", [activated, up], [f"{at}.mlp.gated"])
    return project(graph, gated, f"{at}.mlp.down")


def _select_rows(graph: GraphWriter, values: str, indices: str) -> str:
    """Keep only the positions whose logits are asked for: [batch, sequence, hidden] → [num_logits, hidden]."""
    shape = graph.constant("rows.shape", [-1, graph.description.hidden_size])
    flat = graph.node("Reshape", [values, shape], [f"{values}.rows"])
    return graph.node("Gather", [flat, indices], [f"{values}.selected"], axis=0)


def project_to_vocabulary(graph: GraphWriter, values: str) -> str:
    if "head.weight" in graph.weights:
        return project(graph, values, "head", output="logits")
    return graph.node(
        "FusedMatMul", [values, graph.float32_weight("embedding.weight")], ["logits"], domain=MICROSOFT, transB=1
    )


def _projection_shape(description: ModelDescription, name: str) -> tuple[int, int]:
    """Return outputs and inputs of a projection."""
    hidden, inner = description.hidden_size, description.intermediate_size
    match name.rpartition(".")[2]:
        case "qkv":
            return description.query_size + 2 * description.kv_size, hidden
        case "output":
            return hidden, description.query_size
        case "gate" | "up":
            return inner, hidden
        case "down":
            return hidden, inner
        case "head":
            return description.vocab_size, hidden
        case _:
            raise AssertionError(f"no projection {name}")


def _model(graph: GraphWriter) -> ModelProto:
    description = graph.description
    cache_shape: list[int | str] = ["batch_size", description.num_kv_heads, "cache_length", description.cache_head_dim]
    layers = range(description.num_layers)
    inputs = [
        _value("input_ids", TensorProto.INT64, ["batch_size", "sequence_length"]),
        _value("seqlens_k", TensorProto.INT32, ["batch_size"]),
        _value("total_sequence_length", TensorProto.INT32, []),
        _value("logits_indices", TensorProto.INT64, ["num_logits"]),
    ]
    outputs = [_value("logits", TensorProto.FLOAT, ["num_logits", description.vocab_size])]
    for layer in layers:
        for part in ("key", "value"):
            inputs.append(_value(f"past_{part}_{layer}", TensorProto.FLOAT, cache_shape))
            outputs.append(_value(f"present_{part}_{layer}", TensorProto.FLOAT, cache_shape))
    proto: GraphProto = helper.make_graph(
        graph.nodes, "promptmill", inputs, outputs, initializer=list(graph.used.values())
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(proto, opset_imports=opsets, ir_version=IR_VERSION, producer_name="promptmill")


def _value(name: str, kind: int, shape: list[int | str]) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)
