"""The CUDA flavour: one decoder graph over paged blocks, run on a stream of our own.

Every buffer a run touches is a plain device allocation made here and bound by address. A step is one copy in from
pinned memory, one run, one copy out, and an event to wait for; nothing else synchronizes. Decode steps replay a CUDA
graph, one for each bucket of rows and table width, captured by `start`; a prefill runs eagerly in its exact shape.

Captured graphs, cuBLAS handles and cuDNN plans belong to the thread that made them: whoever calls `start` must make
every other call too. One process drives one device, which it sees as device 0.
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import structlog
from onnx import TensorProto

from storage.errors import PromptmillError
from workers.engine.blocks import SCRATCH_BLOCK, block_size_for, blocks_for
from workers.engine.paged_engine import (
    BlockCopy,
    Int64s,
    PagedDecode,
    PagedPrefill,
    SamplingArrays,
    SamplingExtras,
    StepResult,
)
from workers.engine.request import DEVICE_FAILED
from workers.engine.scheduler import Int32s, bucket_for
from workers.models.cuda_graph import (
    MAX_LOGPROBS,
    ONNX_TYPES,
    Decoder,
    Operators,
    WeightPart,
    attention_room,
    build_decoder_graph,
    build_sampler_graph,
    decoder_weights,
    has_own_attention,
    tile_tokens,
    uses_paged_attention,
    weight_parts,
    weight_shapes,
)
from workers.models.description import CudaType, ModelDescription

if TYPE_CHECKING:
    from workers.engine.cuda_ops import OwnOperators

log = structlog.get_logger()

Bytes = npt.NDArray[np.uint8]

# Addresses that ONNX Runtime aliases start at whole multiples of this.
_ALIGNMENT_BYTES = 256
# Uses of pinned memory until it is used again: more than the engine has in flight, with copies before its steps.
_RING = 16
# Kept free for captured graphs, library handles and the allocator's rounding.
RESERVED_BYTES = 2 << 30
# So many captured graphs have fitted into that (H200, 32 layers); each further one is given this much more.
_RESERVED_GRAPHS = 100
_GRAPH_BYTES = 12 << 20
_ITEM_BYTES = 2  # float16 and bfloat16
_ITEM_SIZES: Mapping[int, int] = {
    TensorProto.FLOAT: 4,
    TensorProto.INT64: 8,
    TensorProto.FLOAT16: _ITEM_BYTES,
    TensorProto.BFLOAT16: _ITEM_BYTES,
}
_EAGER = -1  # the graph id of a run that is not captured
_MAX_NEW_OF_PIECES = 2
# Distinct tokens a row's penalties and biases may name before the buffers for them are made larger.
_SPARSE_WIDTH = 256
# Rows are drawn in so many parts that one's logits have no more elements than this: a sampler holds a dozen arrays of
# that size in float32.
_DRAWN_AT_ONCE = 1 << 23
_DRAWN_ROWS = 64  # and parts are multiples of so many rows, whose arrays then begin at aligned addresses


class CudaError(PromptmillError):
    """The device or its driver refused a call."""


@dataclass(frozen=True, slots=True)
class DeviceTensor:
    """A tensor in device memory that someone else keeps alive."""

    pointer: int
    shape: tuple[int, ...]


@dataclass(slots=True)
class CudaTicket:
    """A launched step. first_source: where in the token pool its tokens lie."""

    first_source: int
    count: int
    slot: _Slot
    has_extras: bool


@dataclass(slots=True, eq=False)
class _Slot:
    """Pinned memory of one step in flight, and the event behind its last copy."""

    control: Bytes
    control_pointer: int
    sampling: Bytes
    sampling_pointer: int
    output: Bytes
    output_pointer: int
    event: Any


@dataclass(slots=True, eq=False)
class _Lane:
    """A stream with its sessions, control memory and outputs. Steps of one lane run one after the other."""

    stream: Any
    handle: int
    decoders: dict[Decoder, Any]
    samplers: tuple[Any, Any]  # without and with extras
    binding: Any  # of prefill
    sampler_bindings: tuple[Any, Any]
    control: int
    sampling: int
    logits: int
    fed_ids: int
    extras: int
    slots: list[_Slot]
    next_slot: int = 0


@dataclass(frozen=True, slots=True)
class _ControlOffsets:
    """Where the arrays of a decode step begin in its control buffer, in bytes; the block table comes last."""

    sources: int
    positions: int
    past: int
    slots: int
    prefix_length: int
    prefix_table: int
    end: int

    @classmethod
    def of(cls, rows: int, max_blocks: int) -> _ControlOffsets:
        sizes = (8 * rows, 8 * rows, 4 * rows, 4 * rows, 4, 4 * max_blocks)
        return cls(*accumulate(sizes, lambda end, size: _align(end + size), initial=0))


@dataclass(slots=True)
class _Packer:
    """Lays arrays one behind the other in pinned memory; their device copies lie at the same offsets."""

    memory: Bytes
    base: int
    end: int = 0

    def add(self, values: npt.NDArray[Any]) -> int:
        """Copy an array in; returns its future device address."""
        start = _align(self.end)
        self.end = start + values.nbytes
        assert self.end <= self.memory.nbytes, "a control buffer is too small"
        self.memory[start : self.end] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return self.base + start


class CudaRunner:
    """Runs forward batches on one GPU.

    weights: device tensors of `dtype` by the names of `weight_shapes`. rotary_length: rows of their rotary tables.
    max_rows: rows of the largest decode step. context_length: positions of the longest row. prefill_tokens: tokens of
    the largest prefill. memory_bytes: what the KV cache may take, None for what is free. prefix_min_tokens,
    prefix_min_rows: a beginning of so many tokens that so many rows of a decode step share is read once for all of
    them, where our own attention can; 0 tokens: never. operators: our own (`load_operators`); without them, decode
    steps of `split_min_rows` rows or more rotate q and k outside of attention. release_weights: called when they are
    needed no more.
    """

    def __init__(
        self,
        model: ModelDescription,
        weights: Mapping[str, DeviceTensor],
        *,
        dtype: CudaType,
        rotary_length: int,
        max_rows: int,
        context_length: int,
        prefill_tokens: int = 8448,
        block_size: int | None = None,
        row_buckets: Sequence[int] | None = None,
        table_widths: Sequence[int] | None = None,
        memory_bytes: int | None = None,
        prefix_min_tokens: int = 256,
        prefix_min_rows: int = 32,
        split_min_rows: int = 384,
        operators: OwnOperators | None = None,
        provider_options: Mapping[str, str] | None = None,
        release_weights: Callable[[], None] = lambda: None,
    ) -> None:
        self.vocab_size = model.vocab_size
        self.context_length = context_length
        self.block_size = block_size or block_size_for(model)
        self.max_rows = max_rows
        self.max_blocks = blocks_for(context_length, self.block_size)
        self.row_buckets: Sequence[int] = tuple(row_buckets or cuda_row_buckets(max_rows))
        self.table_widths: Sequence[int] = tuple(table_widths or cuda_table_widths(self.max_blocks))
        self._own = operators
        self.copies_blocks = operators is not None
        self._operators = Operators.FUSED if operators else Operators.STOCK
        self._attends_itself = bool(operators) and has_own_attention(model)
        self._prompt_kind = Decoder.PROMPT if self._attends_itself or not operators else Decoder.STEP
        self.prefix_min_blocks = blocks_for(prefix_min_tokens, self.block_size) if self._attends_itself else 0
        if self.prefix_min_blocks >= self.max_blocks:
            self.prefix_min_blocks = 0  # no row has a token beyond
        self.prefix_min_rows = prefix_min_rows
        self.num_blocks = 0
        self.cache_bytes = 0  # of the KV cache, and what weights and workspace leave for it
        self.room_bytes = 0
        self._model = model
        self._weights = weights
        self._dtype = dtype
        self._kind = ONNX_TYPES[dtype]
        self._rotary_length = rotary_length
        self._prefill_tokens = min(prefill_tokens, max_rows * context_length)  # more than all rows hold is never run
        self._memory_bytes = memory_bytes
        self._provider_options = dict(provider_options or {})
        self._release_weights = release_weights
        self._device_memory: list[int] = []
        self._pinned_memory: list[int] = []
        self._events: list[Any] = []
        self._streams: list[Any] = []
        self._bindings: dict[tuple[int, int, bool], Any] = {}  # by rows, table width, whether over a prefix
        self._graph_ids: dict[tuple[int, int, bool], int] = {}
        self._split_min_rows = split_min_rows
        self._parts = weight_parts(model)
        self._tile_tokens = tile_tokens(model)
        self._drawn_rows = max(1, _DRAWN_AT_ONCE // model.vocab_size // _DRAWN_ROWS) * _DRAWN_ROWS
        self._run_options: dict[int, Any] = {}
        self._ring_at = 0
        self._check_weights()

    # --- start ------------------------------------------------------------------------------------------------------

    def start(self, report: Callable[[str, int, int], None] = lambda *_: None) -> int:
        """Open the sessions, size the KV cache by what a largest prefill leaves free, capture every decode bucket.

        Returns the number of blocks. Raises CudaError `not_enough_memory`.
        """
        import onnxruntime

        self._ort: ModuleType = onnxruntime
        onnxruntime.set_default_logger_severity(3)  # each session warns that CUDA is no plugin; it need not be one
        self._cuda: ModuleType = _load_cuda()
        self._allocate_shared()
        report("opening the model", 0, 1)
        kinds = {self._decoder_of(rows, is_prefix=is_prefix) for rows, _, is_prefix in self._buckets()}
        self._lane = self._open_lane({self._prompt_kind, *kinds})
        self._size_cache()
        self._bind_caches(self._lane.binding)
        self._try_copies()
        self._warm_up(report)
        return self.num_blocks

    def check(self) -> None:
        """Raise CudaError `device_failed` if the device will run nothing any more: such an error stays."""
        self._call("cudaStreamSynchronize", self._lane.stream)

    def close(self) -> None:
        """Wait for the device and give everything back, the weights last."""
        if hasattr(self, "_cuda"):
            self._cuda.cudaDeviceSynchronize()
            # Sessions first: they hold the stream and read the memory.
            self._bindings.clear()
            self.__dict__.pop("_lane", None)
            gives_back = (
                (self._events, self._cuda.cudaEventDestroy),
                (self._streams, self._cuda.cudaStreamDestroy),
                (self._device_memory, self._cuda.cudaFree),
                (self._pinned_memory, self._cuda.cudaFreeHost),
            )
            for held, give_back in gives_back:
                while held:
                    give_back(held.pop())
        self._release_weights()

    # --- steps ------------------------------------------------------------------------------------------------------

    def prefill(self, call: PagedPrefill) -> CudaTicket:
        """Compute KV rows for prompt pieces, and a token for each row whose prompt ends."""
        lane = self._lane
        slot = self._take_slot(lane)
        tokens, rows, count = len(call.token_ids), len(call.lengths), len(call.finishing)
        cumulative = np.zeros(rows + 1, dtype=np.int32)
        np.cumsum(call.lengths, out=cumulative[1:])
        # A graph cannot be run for no row at all: the first token stands in, and nobody reads its logits.
        indices = cumulative[1:][call.finishing].astype(np.int64) - 1 if count else np.zeros(1, dtype=np.int64)
        row_of = np.repeat(np.arange(rows), call.lengths)
        positions = np.arange(tokens) - cumulative[row_of] + call.past_lengths[row_of]
        places = self._slots(call.block_table, row_of, positions)
        packer = _Packer(slot.control, lane.control)
        binding = lane.binding
        self._bind(binding, "positions", TensorProto.INT64, (tokens, 1), packer.add(positions))
        self._bind(binding, "slots", TensorProto.INT32, (tokens,), packer.add(places))
        self._bind(binding, "token_pool", TensorProto.INT64, (tokens,), packer.add(call.token_ids))
        self._bind(binding, "token_sources", TensorProto.INT64, (tokens,), self._iota)
        self._bind(binding, "cumulative_lengths", TensorProto.INT32, (rows + 1,), packer.add(cumulative))
        self._bind(binding, "past_lengths", TensorProto.INT32, (rows,), packer.add(call.past_lengths))
        self._bind(binding, "block_table", TensorProto.INT32, call.block_table.shape, packer.add(call.block_table))
        self._bind(binding, "logits_indices", TensorProto.INT64, indices.shape, packer.add(indices))
        if self._attends_itself:
            tiles = prompt_tiles(call.lengths, call.past_lengths, self._tile_tokens)
            self._bind(binding, "tiles", TensorProto.INT32, tiles.shape, packer.add(tiles))
        else:
            longest = int((call.lengths + call.past_lengths).max())
            # A bound of 1 would mean a decode step, for which cuDNN builds a plan in each new shape.
            most_new = max(int(call.lengths.max()), _MAX_NEW_OF_PIECES)
            self._bind_metadata(binding, most_new, max(longest, most_new), longest)
            self._bind_no_slots(binding, tokens)
        if self._ring_at + indices.size > 2 * self.max_rows:
            self._ring_at = 0
        first = 2 * self.max_rows + self._ring_at
        next_ids = self._pool + first * 8
        self._bind_output(binding, "next_ids", TensorProto.INT64, indices.shape, next_ids)
        self._bind_output(binding, "logits", self._kind, (indices.size, self.vocab_size), lane.logits)
        self._bind_output(binding, "fed_ids", TensorProto.INT64, (tokens,), lane.fed_ids)
        self._copy_in(lane, lane.control, slot.control_pointer, packer.end)
        lane.decoders[self._prompt_kind].run_with_iobinding(binding, self._options(_EAGER))
        ticket = self._finish(lane, slot, call.sampling, first, count)
        self._ring_at += count  # a launch that fails takes no place of the ring: its rows end
        return ticket

    def decode(self, call: PagedDecode) -> CudaTicket:
        """Compute one token for each row, replaying the bucket's graph."""
        lane = self._lane
        slot = self._take_slot(lane)
        self._write_decode(slot.control, call)
        end = self._table_offset + call.rows * call.table_width * 4
        self._copy_in(lane, self._decode_control, slot.control_pointer, end)
        bucket = (call.rows, call.table_width, bool(call.prefix_blocks))
        decoder = lane.decoders[self._decoder_of(call.rows, is_prefix=bool(call.prefix_blocks))]
        decoder.run_with_iobinding(self._bindings[bucket], self._options(self._graph_ids[bucket]))
        first_source = self.decode_source(is_prefix=bool(call.prefix_blocks))
        return self._finish(lane, slot, call.sampling, first_source, len(call.sources))

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy positions between blocks, behind all steps launched so far."""
        assert self._own is not None
        token_bytes = self._model.kv_size * _ITEM_BYTES
        for start in range(0, len(copies), self.max_rows):
            some = copies[start : start + self.max_rows]
            slot = self._take_slot(self._lane)
            packer = _Packer(slot.control, self._lane.control)
            entries = [(copy.source, copy.target, copy.count * token_bytes // 16) for copy in some]
            pointer = packer.add(np.array(entries, dtype=np.int32))
            self._copy_in(self._lane, self._lane.control, slot.control_pointer, packer.end)
            self._own.copy_positions(
                self._lane.stream,
                self._cache,
                pointer,
                len(some),
                planes=2 * self._model.num_layers,
                plane_bytes=self.num_blocks * self.block_size * token_bytes,
                block_bytes=self.block_size * token_bytes,
            )
            self._call("cudaEventRecord", slot.event, self._lane.stream)

    def first_source(self, ticket: CudaTicket) -> int:
        return ticket.first_source

    def decode_source(self, *, is_prefix: bool) -> int:
        return self.max_rows if is_prefix else 0

    def result(self, ticket: CudaTicket) -> StepResult:
        """Wait for a step. The arrays are the caller's."""
        self._call("cudaEventSynchronize", ticket.slot.event)
        rows, count = self.max_rows, ticket.count
        token_ids = ticket.slot.output[: count * 8].view(np.int64).copy()
        if not ticket.has_extras:
            return StepResult(token_ids)
        top = min(MAX_LOGPROBS, self.vocab_size)
        at = rows * 8
        top_ids = ticket.slot.output[at : at + count * top * 8].view(np.int64).reshape(count, top).copy()
        at += rows * top * 8
        top_logprobs = ticket.slot.output[at : at + count * top * 4].view(np.float32).reshape(count, top).copy()
        at += rows * top * 4
        logprob = ticket.slot.output[at : at + count * 4].view(np.float32).copy()
        return StepResult(token_ids, logprob, top_ids, top_logprobs)

    def _write_decode(self, control: Bytes, call: PagedDecode) -> None:
        """Lay out one decode step; rows behind the real ones are padding: past 0, scratch block, any token."""
        count, rows = len(call.sources), call.rows
        at = self._control_offsets
        sources = control[at.sources :].view(np.int64)
        positions = control[at.positions :].view(np.int64)
        past = control[at.past :].view(np.int32)
        slots = control[at.slots :].view(np.int32)
        sources[:count] = call.sources
        sources[count:rows] = 0
        end = self._table_offset + rows * call.table_width * 4
        table = control[self._table_offset : end].view(np.int32).reshape(rows, call.table_width)
        table[:count] = call.block_table
        table[count:] = SCRATCH_BLOCK
        positions[:count] = call.past_lengths
        positions[count:rows] = 0
        shared = len(call.prefix_blocks)
        own = call.past_lengths - shared * self.block_size
        past[:count] = own
        slots[:count] = self._slots(call.block_table, np.arange(count), own)
        control[at.prefix_length :].view(np.int32)[0] = shared * self.block_size
        control[at.prefix_table :].view(np.int32)[:shared] = call.prefix_blocks
        past[count:rows] = 0
        slots[count:rows] = 0

    def _slots(self, block_table: Int32s, row_of: Int64s, positions: npt.NDArray[Any]) -> Int32s:
        """Where in the cache the positions of rows lie."""
        blocks = block_table[row_of, positions // self.block_size]
        places: Int32s = (blocks * self.block_size + positions % self.block_size).astype(np.int32)
        return places

    def _finish(
        self, lane: _Lane, slot: _Slot, sampling: SamplingArrays | None, first_source: int, count: int
    ) -> CudaTicket:
        """Draw where rows ask for it, start the copy back, and mark the place in the stream."""
        next_ids = self._pool + first_source * 8
        has_extras = False
        if count and sampling is not None:
            has_extras = self._sample(lane, slot, sampling, next_ids, count)
        if count:
            self._copy_out(lane, slot.output_pointer, next_ids, count * 8)
        if has_extras:
            self._copy_out(lane, slot.output_pointer + self.max_rows * 8, lane.extras, self._extras_bytes)
        self._call("cudaEventRecord", slot.event, lane.stream)
        return CudaTicket(first_source, count, slot, has_extras)

    def _sample(self, lane: _Lane, slot: _Slot, sampling: SamplingArrays, next_ids: int, count: int) -> bool:
        """Draw a token for each row, in parts of `_drawn_rows` rows. Returns whether extras come back too."""
        extras = sampling.extras
        if extras is not None:
            wanted = count * (64 + 12 * (extras.seen_ids.shape[1] + extras.bias_ids.shape[1])) + 16 * _ALIGNMENT_BYTES
            self._grow_sampling(lane, wanted)
        packer = _Packer(slot.sampling, lane.sampling)
        inputs: dict[str, tuple[int, int, int]] = {}  # element type, columns, address

        def lay(name: str, kind: int, values: npt.NDArray[Any], columns: int = 1) -> None:
            inputs[name] = kind, columns, packer.add(values)

        lay("inverse_temperature", TensorProto.FLOAT, sampling.inverse_temperature)
        lay("top_k", TensorProto.INT64, sampling.top_k)
        lay("top_p", TensorProto.FLOAT, sampling.top_p)
        lay("uniform", TensorProto.FLOAT, sampling.uniform)
        inputs["logits"] = self._kind, self.vocab_size, lane.logits
        outputs = {"next_ids": (TensorProto.INT64, 0, next_ids)}
        if extras is not None:
            lay("fed_counts", TensorProto.FLOAT, extras.fed_counts)
            lay("frequency_penalty", TensorProto.FLOAT, extras.frequency_penalty)
            lay("presence_penalty", TensorProto.FLOAT, extras.presence_penalty)
            lay("seen_ids", TensorProto.INT64, extras.seen_ids, extras.seen_ids.shape[1])
            lay("seen_counts", TensorProto.FLOAT, extras.seen_counts, extras.seen_counts.shape[1])
            lay("bias_ids", TensorProto.INT64, extras.bias_ids, extras.bias_ids.shape[1])
            lay("bias_values", TensorProto.FLOAT, extras.bias_values, extras.bias_values.shape[1])
            inputs["fed_ids"] = TensorProto.INT64, 0, lane.fed_ids
            top = min(MAX_LOGPROBS, self.vocab_size)
            top_logprobs = lane.extras + self.max_rows * top * 8
            outputs["top_ids"] = TensorProto.INT64, top, lane.extras
            outputs["top_logprobs"] = TensorProto.FLOAT, top, top_logprobs
            outputs["logprob"] = TensorProto.FLOAT, 1, top_logprobs + self.max_rows * top * 4
        self._copy_in(lane, lane.sampling, slot.sampling_pointer, packer.end)
        index = 0 if extras is None else 1
        binding = lane.sampler_bindings[index]
        for start in range(0, count, self._drawn_rows):
            rows = min(self._drawn_rows, count - start)
            for arrays, bind in ((inputs, self._bind), (outputs, self._bind_output)):
                for name, (kind, columns, pointer) in arrays.items():
                    shape = (rows, columns) if columns else (rows,)  # no columns: a vector
                    bind(binding, name, kind, shape, pointer + start * max(columns, 1) * _ITEM_SIZES[kind])
            lane.samplers[index].run_with_iobinding(binding, self._options(_EAGER))
        return extras is not None

    # --- memory and sessions ----------------------------------------------------------------------------------------

    def _check_weights(self) -> None:
        for name, shape in weight_shapes(self._model, self._rotary_length).items():
            given = self._weights.get(name)
            assert given is not None and given.shape == shape, f"weight {name}: wanted {shape}, given {given}"

    def _allocate_shared(self) -> None:
        """The token pool, the control memory of decode steps, and arrays that never change.

        Pool, int64: [0, max_rows) the last decode step's tokens; [max_rows, 2 max_rows) those of the last decode step
        over a shared prefix; [2 max_rows, 4 max_rows) a ring of prefills' tokens.
        """
        rows = self.max_rows
        self._control_offsets = _ControlOffsets.of(rows, self.max_blocks)
        self._table_offset = self._control_offsets.end
        self._decode_control_bytes = _align(self._table_offset + rows * max(self.table_widths) * 4)
        self._pool = self._upload(np.zeros(4 * rows, dtype=np.int64))
        self._decode_control = self._allocate(self._decode_control_bytes)
        count = max(self._prefill_tokens, rows) + 1
        self._iota = self._upload(np.arange(count, dtype=np.int64))
        self._iota32 = self._upload(np.arange(count, dtype=np.int32))
        self._no_slots = self._upload(np.full(count, -1, dtype=np.int32))
        if self._attends_itself:
            self._room_count = attention_room(self._model, rows, max(self.table_widths) * self.block_size)
            self._room = self._allocate(4 * self._room_count)
        top = min(MAX_LOGPROBS, self.vocab_size)
        self._extras_bytes = rows * top * (8 + 4) + rows * 4

    def _open_lane(self, kinds: Iterable[Decoder]) -> _Lane:
        cuda = self._cuda
        (stream,) = self._call("cudaStreamCreateWithFlags", cuda.cudaStreamNonBlocking)
        self._streams.append(stream)
        handle = int(stream)
        rows = self.max_rows
        prefill_bytes = self._prefill_tokens * (8 + 8 + 4) + rows * (8 + 4 + 4) + rows * self.max_blocks * 4 + 4096
        prefill_bytes += (self._prefill_tokens // self._tile_tokens + rows) * 8
        control_bytes = max(_align(prefill_bytes), self._decode_control_bytes)
        sampling_bytes = rows * 64 + rows * 12 * _SPARSE_WIDTH + 16 * _ALIGNMENT_BYTES
        output_bytes = rows * 8 + self._extras_bytes
        slots = []
        for _ in range(_RING):
            control, control_pointer = self._pin(control_bytes)
            sampling, sampling_pointer = self._pin(sampling_bytes)
            output, output_pointer = self._pin(output_bytes)
            (event,) = self._call("cudaEventCreateWithFlags", cuda.cudaEventBlockingSync | cuda.cudaEventDisableTiming)
            self._events.append(event)
            slots.append(_Slot(control, control_pointer, sampling, sampling_pointer, output, output_pointer, event))
        decoders = {kind: self._open_decoder(kind, handle) for kind in kinds}
        samplers = (
            self._open_session(
                build_sampler_graph(self._dtype, self.vocab_size, with_extras=False).SerializeToString(), handle
            ),
            self._open_session(
                build_sampler_graph(self._dtype, self.vocab_size, with_extras=True).SerializeToString(), handle
            ),
        )
        binding = decoders[self._prompt_kind].io_binding()
        self._bind_weights(binding, self._prompt_kind)
        return _Lane(
            stream=stream,
            handle=handle,
            decoders=decoders,
            samplers=samplers,
            binding=binding,
            sampler_bindings=(samplers[0].io_binding(), samplers[1].io_binding()),
            control=self._allocate(control_bytes),
            sampling=self._allocate(sampling_bytes),
            logits=self._allocate(rows * self.vocab_size * _ITEM_BYTES),
            fed_ids=self._allocate(max(self._prefill_tokens, rows) * 8),
            extras=self._allocate(self._extras_bytes),
            slots=slots,
        )

    def _open_decoder(self, kind: Decoder, stream: int) -> Any:
        graph = build_decoder_graph(self._model, self._dtype, self._rotary_length, kind, self._operators)
        return self._open_session(graph.SerializeToString(), stream)

    def _open_session(self, model: bytes, stream: int) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        if self._own is not None:
            options.register_custom_ops_library(str(self._own.library))
        options.enable_mem_pattern = False  # patterns are kept for each shape that is ever run
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
        provider = {
            "device_id": "0",
            "enable_cuda_graph": "1",
            "user_compute_stream": str(stream),
            "arena_extend_strategy": "kSameAsRequested",
            **self._provider_options,
        }
        session = self._ort.InferenceSession(model, options, providers=[("CUDAExecutionProvider", provider)])
        session.disable_fallback()
        return session

    def _size_cache(self) -> None:
        """Allocate the KV cache from what a largest prefill, and drawing with all that can be asked for, leave free."""
        model = self._model
        block_bytes = self.block_size * model.kv_size * _ITEM_BYTES
        per_block = 2 * model.num_layers * block_bytes
        self._cache = self._allocate(per_block)
        self.num_blocks = 1
        self._bind_caches(self._lane.binding)
        # Every position falls into the one block there is: what is computed has no meaning, what it takes has.
        tokens = self._prefill_tokens
        longest = min(tokens, self.context_length)
        lengths = [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
        self._prefill_dummy(lengths)
        self._draw_dummy()
        free, total = self._call("cudaMemGetInfo")
        self.room_bytes = int(free + per_block if self._memory_bytes is None else min(free, self._memory_bytes))
        usable = free - RESERVED_BYTES - max(0, len(self._buckets()) - _RESERVED_GRAPHS) * _GRAPH_BYTES
        if self._memory_bytes is not None:
            usable = min(usable, self._memory_bytes)
        self._free(self._cache)
        count = (usable + per_block) // per_block
        if count < 2:
            raise CudaError(
                f"a block of KV cache takes {per_block >> 20} MiB and {usable >> 20} MiB of {total >> 20} MiB are left "
                "beside the weights; use a smaller model or type, or lower PROMPTMILL_ENGINE_PREFILL_CHUNK_TOKENS",
                code="not_enough_memory",
            )
        self.num_blocks = int(min(count, 1 + self.max_rows * self.max_blocks))
        self.cache_bytes = per_block * self.num_blocks
        self._cache = self._allocate(self.cache_bytes)
        self._clear_cache()
        log.info("kv_cache_allocated", blocks=self.num_blocks, kv_cache_bytes=self.cache_bytes)

    def _try_copies(self) -> None:
        """Copy all positions but the last of one block to another, and look at what came there.

        Where that is refused, or not what was to be copied, beginnings that end within a block are computed.
        """
        if not self.copies_blocks:
            return
        try:
            if not self._copies_rightly():
                raise CudaError("a copied block is not as the one that it was copied from", code="device_failed")
        except PromptmillError as error:
            log.warning("block_copies_unavailable", reason=error.message)
            self.copies_blocks = False

    def _copies_rightly(self) -> bool:
        token_bytes = self._model.kv_size * _ITEM_BYTES
        block_bytes, copied = self.block_size * token_bytes, (self.block_size - 1) * token_bytes
        planes = [self._cache + plane * self.num_blocks * block_bytes for plane in (0, 2 * self._model.num_layers - 1)]
        written = np.random.default_rng(0).integers(1, 256, (len(planes), block_bytes), dtype=np.uint8)
        found = np.zeros_like(written)
        lane, target = self._lane, SCRATCH_BLOCK + 1  # nothing is in any block yet
        try:
            for plane, values in zip(planes, written, strict=True):
                self._copy_in(lane, plane + SCRATCH_BLOCK * block_bytes, values.ctypes.data, block_bytes)
            self.copy_blocks([BlockCopy(SCRATCH_BLOCK, target, self.block_size - 1)])
            for plane, values in zip(planes, found, strict=True):
                self._copy_out(lane, values.ctypes.data, plane + target * block_bytes, block_bytes)
            self.check()
        finally:  # padding reads the scratch block
            self._clear_cache()
        return bool(np.array_equal(found[:, :copied], written[:, :copied]) and not found[:, copied:].any())

    def _prefill_dummy(self, lengths: Sequence[int]) -> None:
        rows = len(lengths)
        width = blocks_for(max(lengths), self.block_size)
        call = PagedPrefill(
            token_ids=np.arange(sum(lengths), dtype=np.int64) % self.vocab_size,
            lengths=np.array(lengths, dtype=np.int32),
            past_lengths=np.zeros(rows, dtype=np.int32),
            block_table=np.full((rows, width), SCRATCH_BLOCK, dtype=np.int32),
            finishing=np.arange(rows, dtype=np.int64),
            sampling=None,
        )
        self.result(self.prefill(call))

    def _draw_dummy(self) -> None:
        """Draw for as many rows as are drawn at once, with and without extras: what samplers take, they keep."""
        rows = min(self._drawn_rows, self.max_rows)
        ones, halves = np.ones(rows, dtype=np.float32), np.full(rows, 0.5, dtype=np.float32)
        ids = np.zeros((rows, 1), dtype=np.int64)
        extras = SamplingExtras(ones, ids, ones[:, None], ones, ones, ids, ones[:, None])
        for asked in (None, extras):
            slot = self._take_slot(self._lane)
            sampling = SamplingArrays(ones, np.full(rows, self.vocab_size, dtype=np.int64), ones, halves, asked)
            self.result(self._finish(self._lane, slot, sampling, 0, rows))

    def _buckets(self) -> list[tuple[int, int, bool]]:
        """Every decode bucket: rows, table width, whether over a prefix. Most rows first, for then what a session
        allocates for them serves the smaller ones too.
        """
        buckets = [(rows, width, False) for rows in self.row_buckets for width in self.table_widths]
        if self.prefix_min_blocks:
            widest = bucket_for(self.max_blocks - self.prefix_min_blocks, self.table_widths)
            widths = [width for width in self.table_widths if width <= widest]
            able = [rows for rows in self.row_buckets if rows >= self.prefix_min_rows]
            buckets += [(rows, width, True) for rows in able for width in widths]
        return sorted(buckets, reverse=True)

    def _warm_up(self, report: Callable[[str, int, int], None]) -> None:
        """Capture a graph for each decode bucket. The first run of a graph id is two eager ones and the capture."""
        buckets = self._buckets()
        for done, bucket in enumerate(buckets):
            report("warming up", done, len(buckets))
            rows, width, is_prefix = bucket
            shared = self.prefix_min_blocks if is_prefix else 0
            self._graph_ids[bucket] = done + 1
            self._bindings[bucket] = self._bind_decode(rows, width, is_prefix=is_prefix)
            call = PagedDecode(
                rows=rows,
                table_width=width,
                sources=np.zeros(1, dtype=np.int64),
                past_lengths=np.full(1, shared * self.block_size, dtype=np.int32),
                block_table=np.full((1, width), SCRATCH_BLOCK, dtype=np.int32),
                sampling=None,
                prefix_blocks=(SCRATCH_BLOCK,) * shared,
            )
            self.result(self.decode(call))
        report("warming up", len(buckets), len(buckets))

    def _bind_decode(self, rows: int, width: int, *, is_prefix: bool) -> Any:
        kind = self._decoder_of(rows, is_prefix=is_prefix)
        lane, binding = self._lane, self._lane.decoders[kind].io_binding()
        self._bind_weights(binding, kind)
        self._bind_caches(binding)
        control, at = self._decode_control, self._control_offsets
        self._bind(binding, "token_pool", TensorProto.INT64, (4 * self.max_rows,), self._pool)
        self._bind(binding, "token_sources", TensorProto.INT64, (rows,), control + at.sources)
        self._bind(binding, "past_lengths", TensorProto.INT32, (rows,), control + at.past)
        self._bind(binding, "slots", TensorProto.INT32, (rows,), control + at.slots)
        self._bind(binding, "block_table", TensorProto.INT32, (rows, width), control + self._table_offset)
        self._bind(binding, "logits_indices", TensorProto.INT64, (rows,), self._iota)
        if uses_paged_attention(self._model, kind, self._operators):
            self._bind(binding, "cumulative_lengths", TensorProto.INT32, (rows + 1,), self._iota32)
            self._bind_metadata(binding, 1, width * self.block_size, 1)
        else:
            self._bind(binding, "attention_room", TensorProto.FLOAT, (self._room_count,), self._room)
        if kind is not Decoder.STEP or self._operators is Operators.FUSED:
            self._bind(binding, "positions", TensorProto.INT64, (rows, 1), control + at.positions)
        if is_prefix:
            self._bind(binding, "prefix_length", TensorProto.INT32, (1,), control + at.prefix_length)
            self._bind(binding, "prefix_table", TensorProto.INT32, (self.max_blocks,), control + at.prefix_table)
        elif kind is Decoder.STEP:
            self._bind_no_slots(binding, rows)
        next_ids = self._pool + (self.max_rows * 8 if is_prefix else 0)
        self._bind_output(binding, "next_ids", TensorProto.INT64, (rows,), next_ids)
        self._bind_output(binding, "logits", self._kind, (rows, self.vocab_size), lane.logits)
        self._bind_output(binding, "fed_ids", TensorProto.INT64, (rows,), lane.fed_ids)
        return binding

    def _decoder_of(self, rows: int, *, is_prefix: bool) -> Decoder:
        """What runs a bucket."""
        if is_prefix:
            return Decoder.PREFIX
        if self._attends_itself:
            return Decoder.DECODE
        return Decoder.PROMPT if rows >= self._split_min_rows and not self._own else Decoder.STEP

    def _bind_weights(self, binding: Any, kind: Decoder) -> None:
        for name, shape in decoder_weights(self._model, self._rotary_length, kind, self._operators).items():
            pointer = self._weights[name].pointer if name in self._weights else self._part_pointer(name)
            self._bind(binding, name, self._kind, shape, pointer)

    def _part_pointer(self, name: str) -> int:
        """Where a part of a merged weight begins."""
        part = self._parts[name]
        return self._weights[part.whole].pointer + part.first_row * part.shape[1] * _ITEM_BYTES

    def _bind_no_slots(self, binding: Any, tokens: int) -> None:
        """What keeps PagedAttention from storing what our own operator has stored."""
        if self._operators is Operators.FUSED:
            self._bind(binding, "no_slots", TensorProto.INT32, (tokens,), self._no_slots)

    def _bind_caches(self, binding: Any) -> None:
        model = self._model
        shape = (self.num_blocks, self.block_size, model.num_kv_heads, model.cache_head_dim)
        size = self.num_blocks * self.block_size * model.kv_size * _ITEM_BYTES
        for layer in range(model.num_layers):
            self._bind(binding, f"key_{layer}", self._kind, shape, self._cache + 2 * layer * size)
            self._bind(binding, f"value_{layer}", self._kind, shape, self._cache + (2 * layer + 1) * size)

    def _bind(self, binding: Any, name: str, kind: int, shape: Sequence[int], pointer: int) -> None:
        binding.bind_input(name, "cuda", 0, kind, list(shape), pointer)

    def _bind_output(self, binding: Any, name: str, kind: int, shape: Sequence[int], pointer: int) -> None:
        binding.bind_output(name, "cuda", 0, kind, list(shape), pointer)

    def _bind_metadata(self, binding: Any, most_new: int, longest: int, longest_at_least: int) -> None:
        values = np.array([most_new, longest, longest_at_least], dtype=np.int32)
        binding.bind_ortvalue_input("attention_metadata", self._ort.OrtValue.ortvalue_from_numpy(values))

    def _options(self, graph_id: int) -> Any:
        options = self._run_options.get(graph_id)
        if options is None:
            options = self._ort.RunOptions()
            options.add_run_config_entry("gpu_graph_id", str(graph_id))
            options.add_run_config_entry("disable_synchronize_execution_providers", "1")
            self._run_options[graph_id] = options
        return options

    # --- the driver -------------------------------------------------------------------------------------------------

    def _take_slot(self, lane: _Lane) -> _Slot:
        """Pinned memory for the next step. Its last step, several behind, has been read by now."""
        slot = lane.slots[lane.next_slot]
        lane.next_slot = (lane.next_slot + 1) % len(lane.slots)
        return slot

    def _grow_sampling(self, lane: _Lane, wanted_bytes: int) -> None:
        """Make the buffers of sampling inputs large enough, twice what is wanted."""
        if wanted_bytes <= lane.slots[0].sampling.nbytes:
            return
        self._call("cudaStreamSynchronize", lane.stream)
        # One after the other, and each is there before the old one goes: where memory is refused the step fails, and
        # what all slots have stays in use.
        larger = self._allocate(2 * wanted_bytes)
        self._free(lane.sampling)
        lane.sampling = larger
        for slot in reversed(lane.slots):
            pinned = self._pin(2 * wanted_bytes)
            self._unpin(slot.sampling_pointer)
            slot.sampling, slot.sampling_pointer = pinned

    def _copy_in(self, lane: _Lane, target: int, source: int, count: int) -> None:
        self._call(
            "cudaMemcpyAsync", target, source, count, self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice, lane.stream
        )

    def _copy_out(self, lane: _Lane, target: int, source: int, count: int) -> None:
        self._call(
            "cudaMemcpyAsync", target, source, count, self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost, lane.stream
        )

    def _allocate(self, count: int) -> int:
        (pointer,) = self._call("cudaMalloc", count)
        self._device_memory.append(int(pointer))
        return int(pointer)

    def _free(self, pointer: int) -> None:
        self._device_memory.remove(pointer)
        self._call("cudaFree", pointer)

    def _upload(self, values: npt.NDArray[Any]) -> int:
        pointer = self._allocate(values.nbytes)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpy", pointer, values.ctypes.data, values.nbytes, kind)
        self._call("cudaDeviceSynchronize")  # see `_fill`
        return pointer

    def _clear_cache(self) -> None:
        self._call("cudaMemset", self._cache, 0, self.cache_bytes)
        self._call("cudaDeviceSynchronize")  # it is done in another stream than ours, which waits for none

    def _pin(self, count: int) -> tuple[Bytes, int]:
        (pointer,) = self._call("cudaHostAlloc", count, self._cuda.cudaHostAllocDefault)
        self._pinned_memory.append(int(pointer))
        memory = np.frombuffer(memoryview((ctypes.c_uint8 * count).from_address(int(pointer))), dtype=np.uint8)
        memory[:] = 0
        return memory, int(pointer)

    def _unpin(self, pointer: int) -> None:
        self._pinned_memory.remove(pointer)
        self._call("cudaFreeHost", pointer)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        return _checked(self._cuda, name, getattr(self._cuda, name)(*arguments))


@dataclass(slots=True)
class UploadedWeights:
    """Weights in one device allocation that this object owns."""

    tensors: dict[str, DeviceTensor]
    pointer: int
    _cuda: ModuleType = field(repr=False)

    def close(self) -> None:
        """Free them; nothing the second time."""
        if self.pointer:
            self._cuda.cudaFree(self.pointer)
        self.pointer = 0


def upload_weights(
    model: ModelDescription,
    rotary_length: int,
    weights: Iterable[tuple[str, npt.NDArray[np.uint16]]],
    report: Callable[[str, int, int], None] = lambda *_: None,
) -> UploadedWeights:
    """Copy every weight to the device, one at a time.

    Raises CudaError: `not_enough_memory`, or that the device refused.
    """
    cuda = _load_cuda()
    shapes = weight_shapes(model, rotary_length)
    offsets: dict[str, int] = {}
    end = 0
    for name, shape in shapes.items():
        offsets[name] = end
        end = _align(end + int(np.prod(shape)) * _ITEM_BYTES)
    free, total = _checked(cuda, "cudaMemGetInfo", cuda.cudaMemGetInfo())
    if end + RESERVED_BYTES > free:
        raise CudaError(
            f"the weights take {end >> 20} MiB, and {max(0, free - RESERVED_BYTES) >> 20} MiB of the GPU's "
            f"{total >> 20} MiB can be had; end what else runs on it, or use a smaller model",
            code="not_enough_memory",
        )
    (pointer,) = _checked(cuda, "cudaMalloc", cuda.cudaMalloc(end))
    uploaded = UploadedWeights({}, int(pointer), cuda)
    try:
        _fill(uploaded, shapes, weight_parts(model), offsets, weights, report)
    except BaseException:
        uploaded.close()
        raise
    return uploaded


def _fill(
    uploaded: UploadedWeights,
    shapes: Mapping[str, tuple[int, ...]],
    parts: Mapping[str, WeightPart],
    offsets: Mapping[str, int],
    weights: Iterable[tuple[str, npt.NDArray[np.uint16]]],
    report: Callable[[str, int, int], None],
) -> None:
    cuda, pointer = uploaded._cuda, uploaded.pointer
    tensors = {name: DeviceTensor(pointer + offsets[name], shape) for name, shape in shapes.items()}
    missing = {name: shape[0] for name, shape in shapes.items()}  # rows
    for name, values in weights:
        report("loading the model", len(shapes) - len(missing), len(shapes))
        part = parts.get(name) or WeightPart(name, 0, shapes[name])
        assert values.shape == part.shape, f"weight {name} has shape {values.shape}, wanted {part.shape}"
        contiguous = np.ascontiguousarray(values)
        kind = cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        target = tensors[part.whole].pointer + part.first_row * contiguous[0].nbytes
        copied = cuda.cudaMemcpy(target, contiguous.ctypes.data, contiguous.nbytes, kind)
        _checked(cuda, "cudaMemcpy", copied)
        missing[part.whole] -= part.shape[0]
        if not missing[part.whole]:
            del missing[part.whole]
    assert not missing, f"weights are missing: {sorted(missing)}"
    # A copy of pageable memory returns once it has been read, not written, and the engine's stream waits for no other.
    _checked(cuda, "cudaDeviceSynchronize", cuda.cudaDeviceSynchronize())
    uploaded.tensors.update(tensors)


def cuda_row_buckets(max_rows: int, reserved_rows: int = 0) -> tuple[int, ...]:
    """Row counts of decode graphs: powers of two up to 16, then steps of a quarter.

    Coarser than on a CPU: padding rows have no context to read, and up to some 200 rows a step is bound by reading the
    weights. Each bucket costs a capture at start. reserved_rows: rows beyond `max_rows` that are seldom used: one
    bucket more, so that steps without them are what they would be without a reserve.
    """
    buckets = [1, 2, 4, 8]
    while buckets[-1] < max_rows:
        buckets.append(buckets[-1] + max(8, 1 << max(0, buckets[-1].bit_length() - 3)))
    reserved = (max_rows + reserved_rows,) if reserved_rows else ()
    return (*(bucket for bucket in buckets if bucket < max_rows), max_rows, *reserved)


def cuda_table_widths(max_blocks: int) -> tuple[int, ...]:
    """Table widths of decode graphs: powers of two, and the longest context.

    None is one block wide: for so short a bound cuDNN picks a kernel made for prompts (measured on an H200: 20.9 ms
    instead of 9 in the attention of a step of 512 rows).
    """
    widths = [2]
    while widths[-1] < max_blocks:
        widths.append(widths[-1] * 2)
    return (*(width for width in widths if width < max_blocks), max(2, max_blocks))


def prompt_tiles(lengths: Int32s, past_lengths: Int32s, tokens: int) -> Int32s:
    """The tiles in which our own attention takes rows' tokens: int32 [n, 2], a row and the tile's first token in it.

    tokens: of a tile. Those with most to read come first, so that none of them is left alone at the end.
    """
    counts = -(-lengths // tokens)
    row_of = np.repeat(np.arange(lengths.size, dtype=np.int32), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    firsts = (np.arange(row_of.size, dtype=np.int32) - before) * tokens
    order = np.argsort(-(past_lengths[row_of] + firsts), kind="stable")
    tiles: Int32s = np.stack([row_of, firsts], axis=1)[order].astype(np.int32)
    return tiles


def _align(offset: int) -> int:
    return -(-offset // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _load_cuda() -> ModuleType:
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError as error:
        raise CudaError(
            f"the CUDA engine needs the CUDA libraries ({error}); install promptmill[cuda]", code="cuda_missing"
        ) from error


def _checked(cuda: ModuleType, name: str, answer: tuple[Any, ...]) -> tuple[Any, ...]:
    error, *values = answer
    if error != cuda.cudaError_t.cudaSuccess:
        code = "not_enough_memory" if error == cuda.cudaError_t.cudaErrorMemoryAllocation else DEVICE_FAILED
        raise CudaError(f"{name} failed: {error.name}", code=code, retryable=True)
    return tuple(values)
