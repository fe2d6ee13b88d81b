"""Named weights in one external-data file, `model.onnx.data`: written one tensor at a time, read back by memory map.

Every projection is stored as [out, in], the layout of the checkpoints, for Gemm and FusedMatMul with transB=1;
quantized ones as the blocks of MatMulNBits with `<name>.scales` beside them. Norms take the artifact's float type,
rotary tables are float32. Heads are filled up with zeros to cache_head_dim. A tied head is not stored again: in float
types the graph uses `embedding.weight` twice, quantized `embedding.weight` and `head.weight` are two shapes of the
same bytes.

Names: embedding.weight, layers.{i}.attention_norm.weight, layers.{i}.attention.qkv.weight (q, k and v rows one below
the other), layers.{i}.attention.output.weight, layers.{i}.mlp_norm.weight, layers.{i}.mlp.gate.weight, .up.weight,
.down.weight, norm.weight, head.weight, rope.cos, rope.sin.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from workers.models.checkpoint import Checkpoint
from workers.models.description import DType, ModelDescription, Quantization, quantization_of
from workers.models.errors import ArtifactError, UnreadableCheckpoint, UnsupportedModel
from workers.models.quantize import Bits, QuantizedWeight, dequantize, quantize
from workers.models.rope import rotary_tables
from workers.models.smoothing import Smoother

DATA_FILE = "model.onnx.data"
# Memory maps start at a page; Windows maps start at 64 KiB, which small tensors need not waste.
PAGE_BYTES = 4096
LARGE_ALIGNMENT_BYTES = 65536
LARGE_TENSOR_BYTES = 1 << 20

# Weights of a layer as they are stored, q, k and v in one.
_LAYER_WEIGHTS = 7

Progress = Callable[[int, int], None]

_ONNX_TYPES: dict[DType, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}
_NUMPY_TYPES: dict[int, Any] = {
    TensorProto.FLOAT: np.float32,
    TensorProto.FLOAT16: np.float16,
    TensorProto.BFLOAT16: np.uint16,
    TensorProto.UINT8: np.uint8,
}


class WeightWriter:
    """Appends tensors to an external-data file and keeps the ONNX entries that point to them."""

    def __init__(self, path: Path) -> None:
        self.tensors: dict[str, TensorProto] = {}
        self._location = path.name
        self._file: IO[bytes] = path.open("wb")

    def __enter__(self) -> "WeightWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def add(self, name: str, values: NDArray[Any], onnx_type: int) -> None:
        """Write values and remember them under the name. bfloat16 comes as its bits in uint16."""
        alignment = LARGE_ALIGNMENT_BYTES if values.nbytes >= LARGE_TENSOR_BYTES else PAGE_BYTES
        offset = -(-self._file.tell() // alignment) * alignment
        self._file.seek(offset)
        self._file.write(np.ascontiguousarray(values).data)
        self.tensors[name] = _external_tensor(
            name, onnx_type, list(values.shape), self._location, offset, values.nbytes
        )

    def add_view(self, name: str, original: str, shape: list[int]) -> None:
        """Give the bytes of a tensor already written a second name and shape."""
        tensor = self.tensors[original]
        place = {entry.key: entry.value for entry in tensor.external_data}
        self.tensors[name] = _external_tensor(
            name, tensor.data_type, shape, self._location, int(place["offset"]), int(place["length"])
        )


def write_weights(
    checkpoint: Checkpoint,
    dtype: DType,
    context_length: int,
    path: Path,
    progress: Progress,
    text_token_ids: Sequence[int] = (),
) -> dict[str, TensorProto]:
    """Write every weight of the checkpoint in the given type, the few of one layer in memory at a time.

    progress is called with the weights done and in all. text_token_ids: what integer types are smoothed by, if given.
    Returns the ONNX entries by name. Raises UnreadableCheckpoint, and OSError where the disk is full.
    """
    description = checkpoint.description
    quantization = quantization_of("head.weight", dtype)
    smoother = None
    if quantization is not None and text_token_ids:
        smoother = Smoother(description, lambda name: _read(checkpoint, name), text_token_ids)
    total = _LAYER_WEIGHTS * description.num_layers + 3
    with WeightWriter(path) as writer:
        for done, (name, weight) in enumerate(_stored_weights(checkpoint, dtype, smoother)):
            progress(done, total)
            _add_weight(writer, name, weight, dtype)
        if quantization is not None:
            _add_quantized_embedding(writer, checkpoint, quantization)
        cos, sin = rotary_tables(description, context_length)
        fill = ((0, 0), (0, description.cache_head_dim // 2 - cos.shape[1]))
        cos, sin = np.pad(cos, fill, constant_values=1.0), np.pad(sin, fill)
        writer.add("rope.cos", cos.astype(np.float32), TensorProto.FLOAT)
        writer.add("rope.sin", sin.astype(np.float32), TensorProto.FLOAT)
        progress(total, total)
        return writer.tensors


class StoredWeights:
    """The weights of an artifact, read lazily as float64 whatever type they are stored in."""

    def __init__(self, model_path: Path) -> None:
        model = onnx.load(str(model_path), load_external_data=False)
        self._folder = model_path.parent
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        # The operator that reads a quantized weight says how many bits it has.
        self._bits: dict[str, Bits] = {
            name: attribute.i
            for node in model.graph.node
            if node.op_type in ("MatMulNBits", "GatherBlockQuantized")
            for attribute in node.attribute
            if attribute.name == "bits"
            for name in node.input[:2]
        }

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def float64(self, name: str, columns: int | None = None) -> NDArray[np.float64]:
        """Return a weight in float64. columns: the inputs of a projection, for the fill of a last block is cut off."""
        return self._float64(name, slice(None), columns)

    def float64_rows(self, name: str, columns: int, rows: Sequence[int]) -> NDArray[np.float64]:
        """Return some rows of a weight in float64."""
        return self._float64(name, list(rows), columns)

    def _float64(self, name: str, rows: Any, columns: int | None) -> NDArray[np.float64]:
        stored = self._array(name)
        if stored.dtype == np.uint8:
            scales = self._array(f"{name}.scales")
            blocks = stored.reshape(*scales.shape, -1)
            weight = dequantize(QuantizedWeight(blocks[rows], scales[rows]), self._bits[name], stored.size)
            return np.asarray(weight[:, :columns], dtype=np.float64)
        return np.asarray(stored[rows], dtype=np.float64)

    def _array(self, name: str) -> NDArray[Any]:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise ArtifactError(f"{self._folder}: the graph has no weight {name}; convert the checkpoint again")
        place = {entry.key: entry.value for entry in tensor.external_data}
        kind = _NUMPY_TYPES[tensor.data_type]
        values: NDArray[Any] = np.memmap(
            self._folder / place["location"],
            dtype=kind,
            mode="r",
            offset=int(place["offset"]),
            shape=tuple(tensor.dims),
        )
        if tensor.data_type == TensorProto.BFLOAT16:
            return bfloat16_to_float32(values)
        return values


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; returns the bits."""
    bits = values.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _stored_weights(
    checkpoint: Checkpoint, dtype: DType, smoother: Smoother | None
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield each weight under its stored name, in the order of the file."""
    description = checkpoint.description
    if quantization_of("embedding.weight", dtype) is None:
        yield "embedding.weight", _read(checkpoint, "embedding.weight")
    for layer in range(description.num_layers):
        weights = smoother.layer(layer) if smoother else _layer_weights(checkpoint, layer)
        rows = []
        for name, weight in weights:
            filled = _pad_heads(name, weight, description)
            if not name.endswith(("attention.q.weight", "attention.k.weight", "attention.v.weight")):
                yield name, filled
                continue
            rows.append(filled)
            if len(rows) == 3:
                yield f"layers.{layer}.attention.qkv.weight", np.concatenate(rows)
    yield "norm.weight", _read(checkpoint, "norm.weight")
    if not description.tie_word_embeddings:
        yield "head.weight", _read(checkpoint, "head.weight")
    elif quantization_of("head.weight", dtype) is not None:
        yield "head.weight", _read(checkpoint, "embedding.weight")


def _layer_weights(checkpoint: Checkpoint, layer: int) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield a layer's weights as the checkpoint has them, in the order of the file."""
    for name in ("attention_norm", "attention.q", "attention.k", "attention.v", "attention.output"):
        yield f"layers.{layer}.{name}.weight", _read(checkpoint, f"layers.{layer}.{name}.weight")
    for name in ("mlp_norm", "mlp.gate", "mlp.up", "mlp.down"):
        yield f"layers.{layer}.{name}.weight", _read(checkpoint, f"layers.{layer}.{name}.weight")


def _read(checkpoint: Checkpoint, name: str) -> NDArray[np.float32]:
    weight = checkpoint.tensor(name)
    if not np.isfinite(weight).all():
        raise UnreadableCheckpoint(f"weight {name} holds numbers that are not finite; the checkpoint is damaged")
    return weight


def _pad_heads(name: str, weight: NDArray[np.float32], description: ModelDescription) -> NDArray[np.float32]:
    """Fill each head up with zeros to cache_head_dim, where a kernel wants larger heads than the model has.

    Both rotary halves of q and k are filled at their end, so that channel i still turns with channel i + half.
    """
    fill = description.cache_head_dim - description.head_dim
    kind = name.rpartition("attention.")[2]
    if not fill or kind not in ("q.weight", "k.weight", "v.weight", "output.weight"):
        return weight
    hidden_size, head_dim = description.hidden_size, description.head_dim
    if kind == "output.weight":
        heads = weight.reshape(hidden_size, -1, head_dim)
        return np.pad(heads, ((0, 0), (0, 0), (0, fill))).reshape(hidden_size, -1)
    if kind == "v.weight":
        heads = weight.reshape(-1, head_dim, hidden_size)
        return np.pad(heads, ((0, 0), (0, fill), (0, 0))).reshape(-1, hidden_size)
    halves = weight.reshape(-1, 2, head_dim // 2, hidden_size)
    return np.pad(halves, ((0, 0), (0, 0), (0, fill // 2), (0, 0))).reshape(-1, hidden_size)


def _add_weight(writer: WeightWriter, name: str, weight: NDArray[np.float32], dtype: DType) -> None:
    quantization = quantization_of(name, dtype)
    if quantization is not None:
        quantized = quantize(
            weight, quantization.bits, quantization.block_size, shares_row_scale=quantization.shares_row_scale
        )
        writer.add(name, quantized.blocks, TensorProto.UINT8)
        writer.add(f"{name}.scales", quantized.scales, TensorProto.FLOAT)
    elif dtype == "float16":
        if np.abs(weight).max() > np.finfo(np.float16).max:
            raise UnsupportedModel(f"weight {name} exceeds the range of float16; convert with --dtype bfloat16")
        writer.add(name, weight.astype(np.float16), TensorProto.FLOAT16)
    elif dtype == "bfloat16":
        writer.add(name, float32_to_bfloat16(weight), TensorProto.BFLOAT16)
    else:
        writer.add(name, weight, TensorProto.FLOAT)


def _add_quantized_embedding(writer: WeightWriter, checkpoint: Checkpoint, quantization: Quantization) -> None:
    """Store the embedding table as GatherBlockQuantized reads it: [vocab_size, blocks * bytes], scales beside it."""
    description = checkpoint.description
    if not description.tie_word_embeddings:
        table = quantize(_read(checkpoint, "embedding.weight"), quantization.bits, quantization.block_size)
        writer.add("embedding.weight", table.blocks.reshape(description.vocab_size, -1), TensorProto.UINT8)
        writer.add("embedding.weight.scales", table.scales, TensorProto.FLOAT)
        return
    blocks, scales = writer.tensors["head.weight"], writer.tensors["head.weight.scales"]
    writer.add_view("embedding.weight", "head.weight", [blocks.dims[0], blocks.dims[1] * blocks.dims[2]])
    writer.add_view("embedding.weight.scales", "head.weight.scales", list(scales.dims))


def _external_tensor(
    name: str, onnx_type: int, shape: list[int], location: str, offset: int, length: int
) -> TensorProto:
    tensor = TensorProto(name=name, data_type=onnx_type, dims=shape, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(length))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor
