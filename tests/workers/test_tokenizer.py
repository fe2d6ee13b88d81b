"""Text to ids and back, for both kinds of tokenizer, whole and token by token."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import (
    DESCRIPTION,
    byte_level_lists,
    byte_level_tokenizer,
    save_sentencepiece,
    tokenizer_description,
)
from tests.shared_data import llama2_tokenizer_folder, stories_folder
from workers.models.artifact import Artifact, Source
from workers.models.description import TokenizerDescription
from workers.models.errors import ArtifactError
from workers.models.vocabulary import byte_level_json, pre_tokenizer
from workers.tokenizer import IncrementalDecoder, StopStrings, Tokenizer

TEXTS = [
    "Hello, world!",
    "  two  spaces   and more ",
    "line\nbreaks\r\n\ttabs",
    "naïve café, Straße, Łódź",
    "你是谁? 東京タワー 한국어",
    "שלום مرحبا नमस्ते ไทย",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 e\u0301",
    "def f(x):\n    return x ** 2  # ∑∞",
    "1234567890 3.14 1,000",
    "\x00\x7f\u200b\ufeff",
    "",
]


def open_tokenizer(folder: Path, description: TokenizerDescription) -> Tokenizer:
    """A tokenizer of files in a folder; the model around it does not matter."""
    return Tokenizer(
        Artifact(
            path=folder,
            model="test",
            dtype="int8",
            context_length=128,
            description=DESCRIPTION,
            tokenizer=description,
            source=Source(name="test", sha256=""),
            files={},
            digest="",
        )
    )


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("llama2")
    shutil.copy(llama2_tokenizer_folder() / "tokenizer.model", folder)
    return open_tokenizer(folder, tokenizer_description(chat_format="llama2"))


@pytest.fixture(scope="module")
def small_sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """<unk>, <s>, </s>, 256 bytes, eleven pieces, and <|im_start|> added after them."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    save_sentencepiece(folder / "tokenizer.model")
    return open_tokenizer(folder, tokenizer_description(added_tokens={"<|im_start|>": 270}))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Built as from a GGUF file: 256 bytes, <|bos|> 256, <|start|> 257, <|end|> 258, then merges."""
    folder = tmp_path_factory.mktemp("byte_level")
    tokens, merges, types = byte_level_lists()
    (folder / "tokenizer.json").write_bytes(byte_level_json(tokens, merges, types, pre_tokenizer("smollm", "test")))
    return open_tokenizer(folder, tokenizer_description(bos_token_id=256, eos_token_id=258, add_bos=True))


@pytest.fixture(params=["llama2", "small_sentencepiece", "byte_level"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found: Tokenizer = request.getfixturevalue(request.param)
    return found


def test_llama2_encodings_are_the_known_ones(llama2: Tokenizer) -> None:
    assert llama2.encode("Hello", add_bos=True) == [1, 15043]
    assert llama2.encode("你是谁", add_bos=False) == [29871, 30919, 30392, 235, 179, 132]
    assert llama2.vocab_size == 32000


def test_stories_prompts_and_answers_are_those_of_transformers(tmp_path: Path) -> None:
    source = stories_folder()
    shutil.copy(source / "tokenizer.model", tmp_path)
    tokenizer = open_tokenizer(tmp_path, tokenizer_description())
    for line in map(json.loads, (source / "greedy.jsonl").read_text().splitlines()):
        assert tokenizer.encode(line["prompt"]) == line["prompt_token_ids"]
        assert tokenizer.decode(line["completion_token_ids"]) == line["completion"]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_mixed_scripts_survive_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_any_text_survives_the_round_trip(
    llama2: Tokenizer, small_sentencepiece: Tokenizer, byte_level: Tokenizer
) -> None:
    """Except what SentencePiece itself cannot tell from its own mark for a space."""

    @given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
    def check(text: str) -> None:
        for tokenizer in (llama2, small_sentencepiece, byte_level):
            assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text

    check()


def test_many_texts_encode_as_one_does(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode_many(TEXTS) == [tokenizer.encode(text) for text in TEXTS]


def test_bos_is_never_doubled(llama2: Tokenizer, byte_level: Tokenizer) -> None:
    assert llama2.encode("<s> Hi", add_bos=True).count(1) == 1
    assert llama2.encode("Hi", add_bos=True)[0] == 1
    assert 1 not in llama2.encode("Hi", add_bos=False)
    assert byte_level.encode("<|bos|>hello") == byte_level.encode("hello") == [256, 262]
    assert byte_level.encode("", add_bos=True) == [256]


def test_the_checkpoint_decides_on_bos_where_nobody_else_does(tmp_path: Path) -> None:
    save_sentencepiece(tmp_path / "tokenizer.model")
    assert open_tokenizer(tmp_path, tokenizer_description(add_bos=False)).encode("h")[0] != 1
    assert open_tokenizer(tmp_path, tokenizer_description(bos_token_id=None)).encode("h", add_bos=True)[0] != 1


def test_special_tokens_in_a_text_are_recognised(small_sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    """Chat templates write them as text. Added tokens lie beyond what SentencePiece knows."""
    ids = small_sentencepiece.encode("<|im_start|>hello</s>", add_bos=False)
    assert ids == [270, *small_sentencepiece.encode("hello", add_bos=False), 2]
    assert byte_level.encode("<|start|>hello<|end|>", add_bos=False) == [257, 262, 258]


def test_special_tokens_are_left_out_of_text(small_sentencepiece: Tokenizer, byte_level: Tokenizer) -> None:
    assert small_sentencepiece.decode([1, *small_sentencepiece.encode("hello", add_bos=False), 270, 2]) == "hello"
    assert byte_level.decode([256, 262, 258]) == "hello"
    assert byte_level.token_bytes(258) == b"<|end|>"
    assert byte_level.token_bytes(9999) == b""
    assert byte_level.is_special(258)
    assert not byte_level.is_special(262)


def test_an_unfinished_character_is_left_out_and_a_broken_one_replaced(tokenizer: Tokenizer) -> None:
    smile = byte_tokens(tokenizer, "🙂")
    plain = byte_tokens(tokenizer, "a")
    assert tokenizer.decode(smile[:3]) == ""
    assert tokenizer.decode([*plain, *smile[:2]]) == "a"
    assert tokenizer.decode([*smile[:2], *plain, *smile]) == "\ufffda🙂"


def test_a_character_comes_out_when_its_last_byte_is_in(tokenizer: Tokenizer) -> None:
    decoder = IncrementalDecoder(tokenizer)
    assert [decoder.push(token) for token in byte_tokens(tokenizer, "é🙂")] == ["", "é", "", "", "", "🙂"]


def test_the_pieces_add_up_to_the_whole(llama2: Tokenizer, byte_level: Tokenizer) -> None:
    """An answer goes on where the prompt ended: the space before its first word belongs to it."""
    for tokenizer, space in ((llama2, " "), (byte_level, "")):
        for text in TEXTS:
            decoder = IncrementalDecoder(tokenizer)
            ids = tokenizer.encode(text)
            assert "".join(decoder.push(token) for token in ids) == (space + text if text else "")


def byte_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """One token for each byte of a text."""
    single = {
        tokenizer.token_bytes(token): token
        for token in reversed(range(tokenizer.vocab_size))
        if not tokenizer.is_special(token)
    }
    return [single[bytes([byte])] for byte in text.encode()]


@pytest.fixture
def push_text(byte_level: Tokenizer) -> Callable[[StopStrings, str], bool]:
    """Give a text to a StopStrings byte by byte; says whether it stopped."""

    def push(stops: StopStrings, text: str) -> bool:
        return True in [stops.push(token) for token in byte_tokens(byte_level, text)]

    return push


@pytest.mark.parametrize(
    ("stops", "text", "kept", "matched"),
    [
        (["END"], "one END two", "one ", "END"),
        (["END"], "one EN D", "one EN D", None),
        (["aab"], "aaab", "a", "aab"),
        (["\n\n", "Q:"], "a\nQ: b\n\n", "a\n", "Q:"),
        (["b", "abc"], "abc", "a", "b"),
        (["bc", "abc"], "abc", "", "abc"),
        (["🙂"], "smile 🙂!", "smile ", "🙂"),
        (["é"], "e\u0301 é", "e\u0301 ", "é"),
        ([], "anything", "anything", None),
        ([""], "anything", "anything", None),
    ],
)
def test_text_is_cut_exactly_before_the_stop(
    byte_level: Tokenizer,
    push_text: Callable[[StopStrings, str], bool],
    stops: list[str],
    text: str,
    kept: str,
    matched: str | None,
) -> None:
    found = StopStrings(byte_level, stops)
    assert push_text(found, text) == (matched is not None)
    assert (found.text, found.matched) == (kept, matched)


def test_a_stop_inside_a_longer_token_cuts_the_token(byte_level: Tokenizer) -> None:
    found = StopStrings(byte_level, ["ell"])
    assert byte_level.encode("hello", add_bos=False) == [262]
    assert found.push(262)
    assert found.text == "h"
    assert found.push(262)
    assert found.text == "h"


def test_the_cut_does_not_depend_on_the_tokens(byte_level: Tokenizer) -> None:
    """Same text, one byte a token or as encoded: the same cut, which a plain search of the text finds too."""
    alphabet = st.text(st.sampled_from("helo 🙂é"), max_size=30)

    @given(alphabet, st.lists(st.text(st.sampled_from("helo 🙂é"), min_size=1, max_size=4), max_size=3))
    def check(text: str, stops: list[str]) -> None:
        ends = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        wanted = text[: min(ends)[1]] if ends else text
        for tokens in (byte_level.encode(text, add_bos=False), byte_tokens(byte_level, text)):
            found = StopStrings(byte_level, stops)
            stopped = True in [found.push(token) for token in tokens]
            # A token may hold more than one stop: the first to be complete counts.
            assert stopped == bool(ends)
            assert found.text == wanted

    check()


def test_pre_tokenizers_split_as_their_models_do(tmp_path: Path) -> None:
    """Digits apart for SmolLM, three together for Llama 3, as many as there are for GPT-2."""
    tokens, _, types = byte_level_lists()
    merges = ["1 2", "12 3", "123 4"]
    tokens += ["12", "123", "1234"]
    types += [1, 1, 1]
    for name, wanted in (("smollm", 4), ("llama-bpe", 2), ("gpt-2", 1), ("qwen2", 4), ("default", 2)):
        folder = tmp_path / name
        folder.mkdir()
        data = byte_level_json(tokens, merges, types, pre_tokenizer(name, "test"))
        (folder / "tokenizer.json").write_bytes(data)
        tokenizer = open_tokenizer(folder, tokenizer_description(add_bos=False))
        assert len(tokenizer.encode("1234")) == wanted, name
        assert tokenizer.decode(tokenizer.encode("1234")) == "1234"


def test_a_tokenizer_of_pieces_in_json_keeps_the_space_rule(tmp_path: Path) -> None:
    """Llama 2's tokenizer.json: a space is put in front when encoding, taken away when decoding."""
    from tokenizers import Tokenizer as JsonTokenizer
    from tokenizers import decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁h", "▁hi"]
    model = models.BPE(
        vocab={piece: index for index, piece in enumerate(pieces)},
        merges=[("▁", "h"), ("▁h", "i")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = JsonTokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(tmp_path, tokenizer_description())
    assert found.encode("hi") == [1, len(pieces) - 1]
    for text in ("hi hi", "hi 🙂", "  hi"):
        assert found.decode(found.encode(text)) == text
    decoder = IncrementalDecoder(found)
    assert "".join(decoder.push(token) for token in found.encode("hi é", add_bos=False)) == " hi é"


def test_a_broken_or_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no tokenizer.json and no tokenizer.model"):
        open_tokenizer(tmp_path, tokenizer_description())
    (tmp_path / "tokenizer.model").write_bytes(b"\x00broken")
    with pytest.raises(ArtifactError, match=r"tokenizer.model cannot be read"):
        open_tokenizer(tmp_path, tokenizer_description())
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer.json cannot be read"):
        open_tokenizer(tmp_path, tokenizer_description())


def test_a_chat_becomes_the_ids_of_its_template(tmp_path: Path) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}")
    tokenizer = open_tokenizer(tmp_path, tokenizer_description(bos_token_id=256, eos_token_id=258, add_bos=True))
    ids = tokenizer.encode_chat([{"role": "user", "content": "é"}])
    assert ids == [256, *byte_tokens(tokenizer, "é"), 258]
