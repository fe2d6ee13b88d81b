"""An artifact of a known shape with random weights, for measuring workers with models whose weights are not at hand.

It is written as fast as the disk takes it: one stretch of random numbers serves every weight, each from another offset.
The tokenizer spells bytes and knows a word for every other id, so that any answer has a text.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from onnx import TensorProto
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from workers.models.artifact import MODEL_FILE, Artifact, Source, load_artifact, new_artifact_folder, write_manifest
from workers.models.cuda_graph import Decoder, Operators, decoder_weights
from workers.models.description import ModelDescription, TokenizerDescription
from workers.models.graph import write_graph
from workers.models.rope import rotary_tables
from workers.models.weights import DATA_FILE, WeightWriter

# Small enough that activations stay in range over any number of layers.
_SCALE = 0.02
_STRETCH = (1 << 24) + 1  # odd, as no weight's size is, so that weights of the same shape differ


def write_random_artifact(folder: Path, name: str, model: ModelDescription, context_length: int) -> Artifact:
    """Write a float16 artifact of this shape into `folder` / `name`."""
    stretch = (np.random.default_rng(0).standard_normal(_STRETCH, dtype=np.float32) * _SCALE).astype(np.float16)
    cos, sin = rotary_tables(model, context_length)
    with new_artifact_folder(folder / name, force=True) as partial:
        with WeightWriter(partial / DATA_FILE) as writer:
            offset = 0
            for weight, shape in decoder_weights(model, context_length, Decoder.STEP, Operators.STOCK).items():
                count = int(np.prod(shape))
                if weight.startswith("rope."):
                    table = cos if weight == "rope.cos" else sin
                    writer.add(weight, table.astype(np.float32), TensorProto.FLOAT)
                elif "norm" in weight:
                    writer.add(weight, np.ones(shape, dtype=np.float16), TensorProto.FLOAT16)
                else:
                    repeated = np.resize(np.roll(stretch, -offset), count).reshape(shape)
                    writer.add(weight, repeated, TensorProto.FLOAT16)
                    offset = (offset + count) % _STRETCH
            write_graph(model, "float16", writer.tensors, partial / MODEL_FILE)
        (partial / "tokenizer.json").write_text(_tokenizer(model.vocab_size).to_str(), encoding="utf-8")
        write_manifest(
            partial,
            model=name,
            dtype="float16",
            context_length=context_length,
            description=model,
            tokenizer=TokenizerDescription(None, 2, (2,), False, "plain"),
            source=Source("random weights", "0" * 64),
        )
    return load_artifact(folder / name, check_digests=False)


def _tokenizer(vocab_size: int) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = itertools.chain(letters, (a + b + c for a, b, c in itertools.product(letters, repeat=3)))
    tokenizer = Tokenizer(
        models.BPE(vocab={word: n for n, word in enumerate(itertools.islice(words, vocab_size))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
