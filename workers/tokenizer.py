"""Text ↔ token ids, for an artifact's tokenizer of either kind.

Bytes are the truth: every token stands for a run of bytes (`token_bytes`), text is those bytes decoded as UTF-8. So a
character that spans tokens never breaks, whoever decodes. Safe to share between threads.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer as JsonTokenizer

from workers.chat_template import ChatTemplate, builtin_template
from workers.models.artifact import CHAT_TEMPLATE_FILE, Artifact
from workers.models.errors import ArtifactError

_SPACE = "▁"  # how SentencePiece writes a space
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of one artifact."""

    def __init__(self, artifact: Artifact) -> None:
        """Raises ArtifactError where the tokenizer's files cannot be read."""
        self.bos_token_id = artifact.tokenizer.bos_token_id
        self.stop_token_ids = artifact.tokenizer.stop_token_ids
        self.add_bos = artifact.tokenizer.add_bos
        self._encoder = open_encoder(artifact.path, artifact.tokenizer.added_tokens)
        template_path = artifact.path / CHAT_TEMPLATE_FILE
        if template_path.exists():
            source = template_path.read_text(encoding="utf-8")
        else:
            source = builtin_template(artifact.tokenizer.chat_format)
        self._template = ChatTemplate(
            source,
            bos_token=self._token_text(artifact.tokenizer.bos_token_id),
            eos_token=self._token_text(artifact.tokenizer.eos_token_id),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens the tokenizer knows; the model's logits may have more columns."""
        return len(self._encoder.token_bytes)

    @property
    def adds_space_prefix(self) -> bool:
        """Whether encoding puts a space before a text, so that an answer's first space is not its own."""
        return self._encoder.adds_space_prefix

    def encode(self, text: str, *, add_bos: bool | None = None) -> list[int]:
        """Return the ids of a text; special tokens written in it are recognised.

        add_bos: put BOS in front unless the text already begins with it; by default as the checkpoint says.
        """
        return self.with_bos(self._encoder.encode(text), add_bos)

    def encode_many(self, texts: Sequence[str], *, add_bos: bool | None = None) -> list[list[int]]:
        """Encode several texts at once, on several cores where the tokenizer can."""
        return [self.with_bos(ids, add_bos) for ids in self._encoder.encode_many(texts)]

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of a chat. Raises InvalidRequest where the template refuses the messages."""
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids of a chat. BOS is the template's business: it writes one where the model wants one."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)
        return self.encode(text, add_bos=False)

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of ids that start a text; special tokens and an unfinished last character are left out."""
        text = self.decode_answer(token_ids)
        return text[1:] if self._encoder.adds_space_prefix and text.startswith(" ") else text

    def decode_answer(self, token_ids: Iterable[int]) -> str:
        """The same for ids that go on from others: their first space is their own."""
        special, size, table = self._encoder.special_ids, len(self._encoder.token_bytes), self._encoder.token_bytes
        data = b"".join([table[token] for token in token_ids if token not in special and 0 <= token < size])
        return codecs.utf_8_decode(data, "replace")[0]

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token stands for: a special token's name, nothing for an id beyond the vocabulary."""
        table = self._encoder.token_bytes
        return table[token_id] if 0 <= token_id < len(table) else b""

    def is_special(self, token_id: int) -> bool:
        """Whether a token steers the model rather than standing for text."""
        return token_id in self._encoder.special_ids

    def with_bos(self, ids: list[int], add_bos: bool | None = None) -> list[int]:
        """Put BOS in front of the ids of a whole prompt, as `encode` does."""
        wanted = self.add_bos if add_bos is None else add_bos
        if wanted and self.bos_token_id is not None and ids[:1] != [self.bos_token_id]:
            return [self.bos_token_id, *ids]
        return ids

    def _token_text(self, token_id: int | None) -> str:
        return "" if token_id is None else self.token_bytes(token_id).decode("utf-8", "replace")


class IncrementalDecoder:
    """Turns the ids of one answer into text as they come."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, which may be empty. Bytes that can never be text become U+FFFD."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))


class StopStrings:
    """The text of one answer so far, and whether a stop string has appeared in it.

    The stop that is complete first ends the text, of several complete at the same character the longest; so the cut
    depends on the text alone, never on how it was cut into tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._decoder = IncrementalDecoder(tokenizer)
        self._stops = [stop for stop in stops if stop]
        self._overlap = max((len(stop) for stop in self._stops), default=1) - 1
        self._pieces: list[str] = []
        self._tail = ""  # the end of the text in which a stop may have begun
        self.matched: str | None = None

    @property
    def text(self) -> str:
        """The text without the stop string and what follows it."""
        return "".join(self._pieces)

    def push(self, token_id: int) -> bool:
        """Add a token; True once a stop string has appeared. Later tokens are ignored."""
        if self.matched is not None:
            return True
        piece = self._decoder.push(token_id)
        if not piece:
            return False
        self._pieces.append(piece)
        window = self._tail + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := window.find(stop)) >= 0]
        if not found:
            self._tail = window[-self._overlap :] if self._overlap else ""
            return False
        _, at, self.matched = min(found)
        text = self.text
        self._pieces = [text[: len(text) - len(window) + at]]
        return True


class Encoder(Protocol):
    """What both kinds of tokenizer file offer. special_ids: tokens that stand for no text."""

    token_bytes: list[bytes]
    special_ids: frozenset[int]
    adds_space_prefix: bool

    def encode(self, text: str) -> list[int]: ...

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]: ...


def open_encoder(folder: Path, added_tokens: Mapping[str, int]) -> Encoder:
    """Open the tokenizer file of a folder. added_tokens: those that a SentencePiece file does not hold.

    Raises ArtifactError where there is none or it cannot be read.
    """
    for name in ("tokenizer.json", "tokenizer.model"):
        path = folder / name
        if path.exists():
            try:
                if name == "tokenizer.json":
                    return _JsonEncoder(path.read_bytes())
                return _SentencePieceEncoder(path, added_tokens)
            except Exception as error:  # both libraries raise nothing narrower
                raise ArtifactError(f"{path} cannot be read: {error}; convert the model again") from error
    raise ArtifactError(f"{folder} has no tokenizer.json and no tokenizer.model; convert the model again")


class _JsonEncoder:
    """A tokenizer.json. The library releases the interpreter lock and caches the words it has seen."""

    def __init__(self, data: bytes) -> None:
        self._tokenizer = JsonTokenizer.from_buffer(data)
        value = json.loads(data)
        is_byte_level = any(step.get("type") == "ByteLevel" for step in _steps(value.get("decoder")))
        to_bytes = _byte_level_bytes if is_byte_level else _piece_bytes
        added = {int(token["id"]): token for token in value.get("added_tokens") or []}
        self.token_bytes = []
        for token_id in range(self._tokenizer.get_vocab_size(with_added_tokens=True)):
            text = self._tokenizer.id_to_token(token_id) or ""
            self.token_bytes.append(text.encode() if token_id in added else to_bytes(text))
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.get("special"))
        self.adds_space_prefix = _prepends_space(value)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(item.ids) for item in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


class _SentencePieceEncoder:
    """A tokenizer.model. SentencePiece does not see control tokens in text, so the text is cut at them first."""

    def __init__(self, path: Path, added_tokens: Mapping[str, int]) -> None:
        self._processor = SentencePieceProcessor(model_file=str(path))
        size = self._processor.vocab_size()
        special = {self._processor.id_to_piece(i): i for i in range(size) if self._processor.is_control(i)}
        special.update(added_tokens)
        self._special = special
        # Longest first: one special token may be the beginning of another.
        names = sorted(special, key=len, reverse=True)
        self._cut = re.compile("|".join(re.escape(name) for name in names)) if names else None
        self.special_ids = frozenset([*special.values(), self._processor.unk_id()])
        self.token_bytes = [_piece_bytes(self._processor.id_to_piece(i)) for i in range(size)]
        self.token_bytes += [b""] * (max(special.values(), default=-1) + 1 - size)
        for text, token_id in special.items():
            self.token_bytes[token_id] = text.encode()
        self.adds_space_prefix = self._processor.encode("a", out_type=str)[:1] != ["a"]

    def encode(self, text: str) -> list[int]:
        if self._cut is None:
            return list(self._processor.encode(text))
        ids: list[int] = []
        position = 0
        for match in self._cut.finditer(text):
            if match.start() > position:
                ids += self._processor.encode(text[position : match.start()])
            ids.append(self._special[match.group()])
            position = match.end()
        if position < len(text):
            ids += self._processor.encode(text[position:])
        return ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def _piece_bytes(piece: str) -> bytes:
    """SentencePiece: ▁ is a space, <0x0A> a byte."""
    byte = _BYTE_PIECE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(_SPACE, " ").encode()


def _byte_level_bytes(text: str) -> bytes:
    """GPT-2: every byte is written as one printable character."""
    return bytes(_BYTES_OF_CHARACTERS[character] for character in text if character in _BYTES_OF_CHARACTERS)


def _byte_characters() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES_OF_CHARACTERS = _byte_characters()


def _prepends_space(value: Mapping[str, Any]) -> bool:
    """Whether encoding puts a space before the text, which decoding has to take away again."""
    metaspace = [step for step in _steps(value.get("pre_tokenizer")) if step.get("type") == "Metaspace"]
    prepends = any(step.get("prepend_scheme", "always") != "never" for step in metaspace)
    return prepends or any(step.get("type") == "Strip" for step in _steps(value.get("decoder")))


def _steps(step: Any) -> list[dict[str, Any]]:
    """A step of a tokenizer.json and, where it is a sequence, the steps it is made of."""
    if not isinstance(step, dict):
        return []
    parts = [*(step.get("decoders") or []), *(step.get("normalizers") or []), *(step.get("pretokenizers") or [])]
    return [step, *(inner for part in parts for inner in _steps(part))]
