"""Tokenizer files: what they declare, and how the lists embedded in a GGUF file become one.

Two formats go into an artifact: `tokenizer.json` (the tokenizers library) and `tokenizer.model` (SentencePiece).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer

from workers.models.description import ChatFormat
from workers.models.errors import UnreadableCheckpoint, UnsupportedModel

# Token types of GGUF, which are SentencePiece's.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# Splitting patterns, as the tokenizer.json of the models that brought them has them.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class PreTokenizer:
    """patterns: applied in turn, each to the pieces the one before left. ignore_merges: whole words first."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False


_PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"),
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_LLAMA3,))),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        PreTokenizer((r"\p{N}", _GPT2)),
    ),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), PreTokenizer((_QWEN2,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
}


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in text before anything else. is_special: left out of decoded text."""

    text: str
    id: int
    is_special: bool


@dataclass(frozen=True)
class SentencePieceTokens:
    """size: pieces in the model. control: text to id of its control pieces."""

    size: int
    control: Mapping[str, int]
    is_llama2: bool


def json_added_tokens(data: bytes, where: str) -> list[AddedToken]:
    """Return the added tokens of a tokenizer.json. where: its path, for messages."""
    try:
        return [
            AddedToken(str(token["content"]), int(token["id"]), bool(token.get("special", False)))
            for token in json.loads(data).get("added_tokens") or []
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnreadableCheckpoint(f"{where} is not a tokenizer of the tokenizers library: {error}") from error


def json_adds_bos(data: bytes, bos_token_id: int | None, where: str) -> bool:
    """Whether the tokenizer.json itself puts a BOS token before plain text."""
    try:
        ids = Tokenizer.from_buffer(data).encode("a", add_special_tokens=True).ids
    except Exception as error:  # the library raises nothing narrower
        raise UnreadableCheckpoint(f"{where} is not a tokenizer of the tokenizers library: {error}") from error
    return bool(ids) and ids[0] == bos_token_id


def json_is_llama2(data: bytes) -> bool:
    vocabulary = json.loads(data).get("model", {}).get("vocab", {})
    return isinstance(vocabulary, dict) and _is_llama2(
        {token: piece for piece, token in vocabulary.items() if token in _LLAMA2_PIECES}
    )


def sentencepiece_tokens(data: bytes, where: str) -> SentencePieceTokens:
    """Read what a SentencePiece model declares. where: its path, for messages."""
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError lives in another package for each implementation
        raise UnreadableCheckpoint(f"{where} is not a SentencePiece model: {error}") from error
    if not model.pieces:
        raise UnreadableCheckpoint(f"{where} is not a SentencePiece model: it has no pieces")
    return SentencePieceTokens(
        size=len(model.pieces),
        control={piece.piece: index for index, piece in enumerate(model.pieces) if piece.type == CONTROL},
        is_llama2=_is_llama2({index: piece.piece for index, piece in enumerate(model.pieces)}),
    )


def chat_format_without_template(is_llama2: bool) -> ChatFormat:
    """Llama 2's own format for its vocabulary; for a base model a plain dialogue (see `chat_template.py`)."""
    return "llama2" if is_llama2 else "plain"


def pre_tokenizer(name: str, where: str) -> PreTokenizer:
    """Look up GGUF's `tokenizer.ggml.pre`."""
    found = _PRE_TOKENIZERS.get(name)
    if found is None:
        raise UnsupportedModel(
            f"{where}: pre-tokenizer {name} is not supported; supported are {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    return found


def byte_level_json(
    tokens: Sequence[str], merges: Sequence[str], token_types: Sequence[int], pre: PreTokenizer
) -> bytes:
    """Build the tokenizer.json of a GPT-2 style byte-level BPE vocabulary."""
    added = [
        {
            "id": index,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token_types[index] != USER_DEFINED,
        }
        for index, text in enumerate(tokens)
        if token_types[index] in (CONTROL, USER_DEFINED, UNKNOWN)
    ]
    split = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in pre.patterns
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": {text: index for index, text in enumerate(tokens)},
            "merges": [_merge_pair(merge) for merge in merges],
        },
    }
    return json.dumps(value, ensure_ascii=False).encode()


def sentencepiece_model(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    *,
    bos_token_id: int | None,
    eos_token_id: int | None,
    add_space_prefix: bool,
) -> bytes:
    """Build the tokenizer.model of a Llama vocabulary: BPE by scores, byte fallback, text left as it is."""
    model = sentencepiece_model_pb2.ModelProto()
    for text, score, kind in zip(tokens, scores, token_types, strict=True):
        piece = model.pieces.add()
        piece.piece, piece.score, piece.type = text, score, kind
    trainer = model.trainer_spec
    trainer.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    trainer.vocab_size = len(tokens)
    trainer.byte_fallback = BYTE in token_types
    trainer.unk_id = token_types.index(UNKNOWN)
    trainer.bos_id = -1 if bos_token_id is None else bos_token_id
    trainer.eos_id = -1 if eos_token_id is None else eos_token_id
    trainer.pad_id = -1
    normalizer = model.normalizer_spec
    normalizer.name = "identity"
    normalizer.add_dummy_prefix = add_space_prefix
    normalizer.remove_extra_whitespaces = False
    normalizer.escape_whitespaces = True
    data: bytes = model.SerializeToString()
    return data


# Where `[INST]` is made of these pieces, the vocabulary is that of Llama 2.
_LLAMA2_PIECES = {518: "▁[", 25580: "INST", 29962: "]"}


def _is_llama2(pieces: Mapping[int, Any]) -> bool:
    return all(pieces.get(token) == piece for token, piece in _LLAMA2_PIECES.items())


def _merge_pair(merge: str) -> list[str]:
    """Two halves around the first space that is not the first character."""
    at = merge.index(" ", 1)
    return [merge[:at], merge[at + 1 :]]
