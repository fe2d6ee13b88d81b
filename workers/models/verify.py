"""Does an artifact compute what its weights say? Digests, epsilon, and logits against the float64 reference."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.engine.session import fastest_graph, open_cpu_session
from workers.models.artifact import Artifact, load_artifact
from workers.models.convert import check_epsilon
from workers.models.description import DType, ModelDescription
from workers.models.errors import VerificationError
from workers.models.reference import reference_logits
from workers.models.weights import StoredWeights
from workers.tokenizer import Tokenizer

PROMPT = "The river was low that summer, and the children found a boat in the reeds. They named it after"
MAX_PROMPT_TOKENS = 32
# Tokens at the end of the prompt that go through the graph one by one, as in decoding.
DECODED_TOKENS = 4

# Largest error of a logit, as a share of the standard deviation of all logits. With float weights (16-bit ones are
# widened, the reference reads the same numbers) only float32 rounding is left. Integer weights are multiplied by
# activations that ONNX Runtime rounds to 8 bits block by block, which the reference does not; the bounds are about
# three times what trained models showed. A wrong weight, table or mask is an error of the size of the deviation itself.
TOLERANCE: dict[DType, float] = {
    "float32": 1e-4,
    "float16": 1e-4,
    "bfloat16": 1e-4,
    "int8": 0.6,
    "int4": 0.6,
}


@dataclass(frozen=True)
class Verification:
    """largest_error: of a logit. relative_error: the same in standard deviations of the logits, which tolerance bounds.

    agreeing_tokens: positions, of prompt_tokens, where graph and reference find the same next token the best.
    """

    prompt_tokens: int
    largest_error: float
    relative_error: float
    tolerance: float
    agreeing_tokens: int


def verify(path: Path, threads: int) -> Verification:
    """Check an artifact from its bytes to its logits, by the graph that runs anywhere and the one this processor gets.

    Raises ArtifactError where it is damaged, VerificationError where the graph computes something else.
    """
    artifact = load_artifact(path, check_digests=True)
    check_epsilon(artifact.model_path, artifact.description.rms_norm_epsilon)
    token_ids = Tokenizer(artifact).encode(PROMPT)[: min(MAX_PROMPT_TOKENS, artifact.context_length)]
    wanted = reference_logits(artifact.description, StoredWeights(artifact.model_path), token_ids)
    graphs = {artifact.model_path, fastest_graph(artifact.model_path)}
    found = [compare_logits(artifact, graph_logits(artifact, graph, token_ids, threads), wanted) for graph in graphs]
    return max(found, key=lambda verification: verification.relative_error)


def compare_logits(artifact: Artifact, found: NDArray[np.float32], wanted: NDArray[np.float64]) -> Verification:
    """Raises VerificationError where an error is beyond the tolerance of the artifact's type."""
    largest_error = float(np.abs(found - wanted).max())
    relative_error = largest_error / float(wanted.std())
    tolerance = TOLERANCE[artifact.dtype]
    if not relative_error <= tolerance:  # also refuses NaN
        raise VerificationError(
            f"{artifact.path}: a logit is off by {largest_error:.3g}, {relative_error:.3g} standard deviations; "
            f"{artifact.dtype} allows {tolerance:.3g}. This machine computes the graph wrongly; please report it"
        )
    return Verification(
        prompt_tokens=len(wanted),
        largest_error=largest_error,
        relative_error=relative_error,
        tolerance=tolerance,
        agreeing_tokens=int((found.argmax(axis=1) == wanted.argmax(axis=1)).sum()),
    )


def graph_logits(artifact: Artifact, graph: Path, token_ids: list[int], threads: int) -> NDArray[np.float32]:
    """Return a graph's logits at every position: most of the prompt at once, its last tokens one by one."""
    session = open_cpu_session(graph, threads, exactly=True)
    names = [output.name for output in session.get_outputs()]
    cache = empty_cache(artifact.description, 1, len(token_ids))
    first = max(1, len(token_ids) - DECODED_TOKENS)
    rows = []
    for begin, end in [(0, first), *((at, at + 1) for at in range(first, len(token_ids)))]:
        logits, *present = session.run(names, cache | step_inputs([token_ids[begin:end]], [begin]))
        cache = dict(zip(cache, present, strict=True))
        rows.append(logits)
    return np.concatenate(rows)


def empty_cache(description: ModelDescription, batch_size: int, length: int) -> dict[str, NDArray[Any]]:
    """KV cache inputs of the graph for rows without a past."""
    shape = (batch_size, description.num_kv_heads, length, description.cache_head_dim)
    return {
        f"past_{part}_{layer}": np.zeros(shape, dtype=np.float32)
        for layer in range(description.num_layers)
        for part in ("key", "value")
    }


def step_inputs(rows: list[list[int]], pasts: list[int]) -> dict[str, NDArray[Any]]:
    """The other inputs of the graph for rows of new tokens behind their pasts; logits everywhere, padding too."""
    width = max(len(row) for row in rows)
    lengths = [past + len(row) for row, past in zip(rows, pasts, strict=True)]
    padded = [row + [0] * (width - len(row)) for row in rows]
    return {
        "input_ids": np.array(padded, dtype=np.int64),
        "seqlens_k": np.array([length - 1 for length in lengths], dtype=np.int32),
        "total_sequence_length": np.array(max(lengths), dtype=np.int32),
        "logits_indices": np.arange(len(rows) * width, dtype=np.int64),
    }
