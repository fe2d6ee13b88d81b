"""The OpenAI formats: what is accepted, what is refused and in which words, and what results look like."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import protocol
from jobs.protocol import (
    ChatBody,
    Choice,
    CompletionBody,
    Endpoint,
    TokenLogprob,
    Usage,
    load_body,
    parse_body,
    render_output_line,
    render_response,
    restore_prefix,
    split_prefix,
)
from storage.errors import InvalidRequest, StorageError

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def chat(**fields: object) -> ChatBody:
    body = parse_body(Endpoint.CHAT, json.dumps(HELLO | fields))
    assert isinstance(body, ChatBody)
    return body


def completion(**fields: object) -> CompletionBody:
    body = parse_body(Endpoint.COMPLETIONS, json.dumps({"prompt": "hello"} | fields))
    assert isinstance(body, CompletionBody)
    return body


def refusal(endpoint: Endpoint, body: object) -> InvalidRequest:
    raw = body if isinstance(body, str | bytes) else json.dumps(body)
    with pytest.raises(InvalidRequest) as caught:
        parse_body(endpoint, raw)
    return caught.value


def refuse_chat(**fields: object) -> InvalidRequest:
    return refusal(Endpoint.CHAT, HELLO | fields)


def refuse_completion(**fields: object) -> InvalidRequest:
    return refusal(Endpoint.COMPLETIONS, {"prompt": "hello"} | fields)


class TestDefaults:
    """A body that says nothing is sampled as OpenAI would."""

    def test_chat_may_fill_the_context(self) -> None:
        wanted = chat().sampling()
        assert wanted.max_tokens is None
        assert (wanted.temperature, wanted.top_p, wanted.top_k, wanted.n) == (1.0, 1.0, 0, 1)
        assert (wanted.seed, wanted.stop, wanted.logprobs, wanted.ignore_eos) == (None, (), None, False)
        assert (wanted.frequency_penalty, wanted.presence_penalty, wanted.logit_bias) == (0.0, 0.0, {})

    def test_completions_stop_after_sixteen_tokens(self) -> None:
        assert completion().sampling().max_tokens == 16

    def test_zero_is_a_value_and_not_an_absence(self) -> None:
        wanted = chat(temperature=0, top_p=0, seed=0).sampling()
        assert (wanted.temperature, wanted.top_p, wanted.seed) == (0.0, 0.0, 0)

    def test_nulls_say_nothing(self) -> None:
        assert chat(temperature=None, stop=None, tools=None, max_tokens=None).to_json() == chat().to_json()


class TestNormalForm:
    """One way to say a thing is stored, so that the worker and the answer cache need to know only one."""

    def test_all_spellings_of_one_request_are_stored_alike(self) -> None:
        spelt = chat(
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
                {"role": "user", "content": "hello"},
            ],
            max_completion_tokens=5,
            stop="END",
            response_format={"type": "text"},
        )
        assert json.loads(spelt.to_json()) == {
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}],
            "max_tokens": 5,
            "stop": ["END"],
        }

    def test_the_normal_form_reads_back_as_itself(self) -> None:
        body = chat(
            max_tokens=7, logit_bias={"5": -3}, stop=["a", "b"], user="u", metadata={"k": "v"}, logprobs=True, n=2
        )
        again = load_body(Endpoint.CHAT, body.to_json())
        assert again.to_json() == body.to_json()
        assert again.sampling() == body.sampling()
        assert again.sampling().logit_bias == {5: -3.0}

    def test_a_token_id_prompt_is_kept(self) -> None:
        assert completion(prompt=[1, 2, 3]).prompt == (1, 2, 3)

    def test_logprobs_mean_the_number_of_alternatives(self) -> None:
        assert chat(logprobs=True).sampling().logprobs == 0
        assert chat(logprobs=True, top_logprobs=4).sampling().logprobs == 4
        assert chat(logprobs=False).sampling().logprobs is None
        assert completion(logprobs=3).sampling().logprobs == 3

    def test_top_k_off_has_one_spelling(self) -> None:
        assert {chat(top_k=value).sampling().top_k for value in (-1, 0)} == {0}


class TestRefusals:
    """Each message names field, value, bound and way out; the code is OpenAI's."""

    @pytest.mark.parametrize(
        ("fields", "code", "message"),
        [
            ({"max_tokens": 0}, "integer_below_min_value", "max_tokens 0 is below 1; raise it"),
            ({"temperature": 2.5}, "decimal_above_max_value", "temperature 2.5 exceeds 2; lower it"),
            ({"presence_penalty": -3}, "decimal_below_min_value", "presence_penalty -3 is below -2; raise it"),
            ({"n": 17}, "integer_above_max_value", "n 17 exceeds 16; lower it"),
            ({"max_tokens": 10**23}, "integer_above_max_value", f"max_tokens {10**23} exceeds {2**31 - 1}; lower it"),
            ({"top_k": 2**63}, "integer_above_max_value", f"top_k {2**63} exceeds {2**31 - 1}; lower it"),
            ({"max_tokens": "64"}, "invalid_type", 'max_tokens is "64", a string; write a whole number'),
            ({"max_tokens": 6.5}, "invalid_type", "max_tokens is 6.5, a decimal number; write a whole number"),
            ({"max_tokens": True}, "invalid_type", "max_tokens is true, a boolean; write a whole number"),
            ({"temprature": 1}, "unknown_parameter", "unknown field temprature = 1; did you mean temperature?"),
            ({"max_new_tokens": 1}, "unknown_parameter", "unknown field max_new_tokens = 1; did you mean max_tokens?"),
            ({"zzz": [1]}, "unknown_parameter", "unknown field zzz = [1]; remove it"),
            ({"stop": ["x"] * 17}, "array_above_max_length", "stop has 17 entries, which exceeds 16; remove some"),
            ({"stop": ""}, "empty_string", 'stop[0] is ""; write at least 1 character or remove it'),
            (
                {"stop": "x" * 513},
                "string_above_max_length",
                "stop[0] has 513 characters, which exceeds 512; shorten it",
            ),
            (
                {"logit_bias": {"cat": 1}},
                "invalid_type",
                "logit_bias.cat has no token id as its key; write whole numbers from 0 as keys",
            ),
            ({"logit_bias": {"7": 101}}, "decimal_above_max_value", "logit_bias.7 101 exceeds 100; lower it"),
            (
                {"stream": True},
                "unsupported_value",
                "stream is true, which only a call over HTTP of its own can do; remove it: the answer comes whole",
            ),
            (
                {"tools": [{"type": "function"}]},
                "unsupported_parameter",
                'tools is [{"type": "function"}], which is not supported; describe the tools in a message instead, '
                "or remove it",
            ),
            (
                {"response_format": {"type": "json_object"}},
                "unsupported_parameter",
                'response_format is {"type": "json_object"}, which is not supported; use {"type": "text"} and ask for '
                "the format in a message",
            ),
            (
                {"top_logprobs": 3},
                "invalid_value",
                'top_logprobs is 3 but logprobs is not true; add "logprobs": true',
            ),
            (
                {"max_tokens": 5, "max_completion_tokens": 6},
                "invalid_value",
                "max_tokens is 5 and max_completion_tokens is 6; they are two names of one bound, keep one",
            ),
            ({"messages": []}, "empty_array", "messages is empty and needs at least 1; add one"),
            ({"messages": "hi"}, "invalid_type", 'messages is "hi", a string; write a list'),
            (
                {"messages": [{"role": "bot", "content": "x"}]},
                "invalid_value",
                "messages[0].role is \"bot\"; write 'system', 'user', 'assistant' or 'tool'",
            ),
            (
                {"messages": [{"role": "user", "content": None}]},
                "invalid_type",
                "messages[0].content is null; write a string",
            ),
            (
                {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
                "unsupported_value",
                'messages[0].content has a part of type "image_url"; only parts of type "text" can be read',
            ),
            (
                {"messages": [{"role": "user", "content": ""}]},
                "empty_prompt",
                "messages has no text: 0 tokens, and at least 1 is needed; write a prompt",
            ),
            (
                {"messages": [{"role": "user", "content": "a\0b"}]},
                "nul_character",
                "messages[0].content has a NUL character at position 1; remove it",
            ),
        ],
    )
    def test_a_chat_body_is_refused_by_name(self, fields: dict[str, object], code: str, message: str) -> None:
        error = refuse_chat(**fields)
        assert (error.code, error.message) == (code, message)
        assert not error.retryable

    @pytest.mark.parametrize(
        ("fields", "code", "message"),
        [
            (
                {"prompt": ["a", "b"]},
                "unsupported_value",
                "prompt is a list of prompts (of 2) and the bound is 1 a request; send one for each",
            ),
            (
                {"prompt": [1, -2]},
                "invalid_type",
                "prompt has -2 at index 1, which is no token id; write whole numbers from 0, or text",
            ),
            ({"prompt": ""}, "empty_prompt", "prompt has no text: 0 tokens, and at least 1 is needed; write a prompt"),
            ({"prompt": []}, "empty_prompt", "prompt has no text: 0 tokens, and at least 1 is needed; write a prompt"),
            ({"prompt": 5}, "invalid_type", "prompt is 5; write text or a list of token ids"),
            ({"logprobs": 6}, "integer_above_max_value", "logprobs 6 exceeds 5; lower it"),
            (
                {"best_of": 2},
                "unsupported_parameter",
                "best_of is 2, which is not supported; use n and choose yourself",
            ),
            (
                {"messages": []},
                "unknown_parameter",
                "unknown field messages = []; remove it",
            ),
        ],
    )
    def test_a_completion_body_is_refused_by_name(self, fields: dict[str, object], code: str, message: str) -> None:
        error = refuse_completion(**fields)
        assert (error.code, error.message) == (code, message)

    @pytest.mark.parametrize(
        "fields",
        [
            {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
            {"response_format": {"type": "text"}, "modalities": ["text"], "stream": False, "verbosity": "medium"},
            {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        ],
    )
    def test_fields_that_ask_for_nothing_pass(self, fields: dict[str, object]) -> None:
        """SDKs send many of them unasked; refusing them would make honest files unusable."""
        assert chat(**fields).sampling() == chat().sampling()

    @pytest.mark.parametrize(
        ("raw", "message"),
        [
            (b'{"prompt": ', "broken JSON: EOF while parsing a value at column 11; write one JSON object"),
            (b'{"prompt":"\\ud800"}', "broken JSON: half of a surrogate pair at column 18; write the whole character"),
            (
                b'{"prompt":' + b"[" * 9000,
                "JSON is nested more than 200 deep; a request needs 5, flatten it",
            ),
            (b"", "broken JSON: EOF while parsing a value at column 0; write one JSON object"),
            (b'{"prompt":\n]', "broken JSON: expected value at line 2 column 1; write one JSON object"),
            (b"[]", "the JSON is []; write one JSON object"),
            (b"null", "the JSON is null; write one JSON object"),
        ],
    )
    def test_broken_json_is_one_clear_error(self, raw: bytes, message: str) -> None:
        error = refusal(Endpoint.COMPLETIONS, raw)
        assert (error.code, error.message) == ("invalid_json", message)

    def test_numbers_that_are_no_numbers_are_refused(self) -> None:
        assert refusal(Endpoint.COMPLETIONS, '{"prompt":"a","temperature":NaN}').code == "invalid_value"
        assert refusal(Endpoint.COMPLETIONS, '{"prompt":"a","temperature":1e999}').code == "invalid_value"
        assert refusal(Endpoint.COMPLETIONS, '{"prompt":"a","seed":' + "9" * 4200 + "}").code == (
            "integer_above_max_value"
        )

    def test_the_gateway_may_allow_a_stream(self) -> None:
        body = parse_body(Endpoint.CHAT, json.dumps(HELLO | {"stream": True}), allow_stream=True)
        assert body.stream is True

    def test_a_long_value_is_shown_cut(self) -> None:
        error = refuse_chat(temperature="x" * 10_000_000)
        assert len(error.message) < 200

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=6,
        ),
        st.sampled_from(sorted(set(ChatBody.model_fields) | set(CompletionBody.model_fields) | {"custom", ""})),
        st.sampled_from(Endpoint),
    )
    def test_any_value_in_any_field_is_accepted_or_refused_by_name(
        self, value: object, field: str, endpoint: Endpoint
    ) -> None:
        """Nothing a user can write may end in a traceback."""
        base = HELLO if endpoint is Endpoint.CHAT else {"prompt": "hello"}
        try:
            body = parse_body(endpoint, json.dumps(base | {field: value}))
        except InvalidRequest as error:
            assert error.message
            assert "\n" not in error.message
            assert error.code
        else:
            assert load_body(endpoint, body.to_json()).to_json() == body.to_json()


class TestPrefixes:
    """A shared beginning is only how a request is kept: taking it off and putting it back changes no byte."""

    @given(st.text(min_size=1), st.text(), st.booleans())
    def test_split_and_restore_round_trip(self, prefix: str, own: str, is_chat: bool) -> None:
        if is_chat:
            body: ChatBody | CompletionBody = ChatBody.model_construct(
                messages=(protocol.Message.model_construct(role="user", content=prefix + own),)
            )
        else:
            body = CompletionBody.model_construct(prompt=prefix + own)
        split = split_prefix(body, prefix)
        assert split.head == own
        assert restore_prefix(split, prefix) == body

    @given(
        st.text(alphabet=st.characters(exclude_categories=["Cs"])),
        st.text(alphabet=st.characters(exclude_categories=["Cs"])),
    )
    def test_a_stored_body_and_its_prefix_give_the_user_s_text(self, prefix: str, own: str) -> None:
        body = CompletionBody.model_construct(prompt=prefix + own)
        stored = split_prefix(body, prefix).to_json()
        assert load_body(Endpoint.COMPLETIONS, stored, prefix).head == prefix + own


LOGPROBS = (
    TokenLogprob(
        "Par", -0.25, b"Par", (TokenLogprob("Par", -0.25, b"Par"), TokenLogprob("Lon", float("-inf"), b"Lon"))
    ),
    TokenLogprob("is", -0.5, b"is"),
)


class TestResults:
    """Clients read these bodies with OpenAI's SDK: every key it reads is there."""

    def test_a_chat_response_has_openai_s_shape(self) -> None:
        response = render_response(
            Endpoint.CHAT,
            id="7f",
            created=1700000000,
            model="smol",
            choices=[Choice("Paris", "stop", LOGPROBS)],
            usage=Usage(prompt_tokens=12, completion_tokens=2, cached_tokens=8),
        )
        assert json.loads(protocol.dump_json(response)) == {
            "id": "chatcmpl-7f",
            "object": "chat.completion",
            "created": 1700000000,
            "model": "smol",
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "Paris", "refusal": None},
                    "logprobs": {
                        "content": [
                            {
                                "token": "Par",
                                "logprob": -0.25,
                                "bytes": [80, 97, 114],
                                "top_logprobs": [
                                    {"token": "Par", "logprob": -0.25, "bytes": [80, 97, 114]},
                                    {"token": "Lon", "logprob": -9999.0, "bytes": [76, 111, 110]},
                                ],
                            },
                            {"token": "is", "logprob": -0.5, "bytes": [105, 115], "top_logprobs": []},
                        ],
                        "refusal": None,
                    },
                    "finish_reason": "stop",
                }
            ],
            "usage": {
                "prompt_tokens": 12,
                "completion_tokens": 2,
                "total_tokens": 14,
                "prompt_tokens_details": {"cached_tokens": 8},
            },
            "system_fingerprint": None,
        }

    def test_a_completion_response_has_openai_s_shape(self) -> None:
        response = render_response(
            Endpoint.COMPLETIONS,
            id="7f",
            created=1700000000,
            model="smol",
            choices=[Choice("Paris", "length", LOGPROBS), Choice("Rome", "stop")],
            usage=Usage(prompt_tokens=1, completion_tokens=3),
            system_fingerprint="fp_1",
        )
        assert response["object"] == "text_completion"
        assert response["choices"] == [
            {
                "index": 0,
                "text": "Paris",
                "logprobs": {
                    "tokens": ["Par", "is"],
                    "token_logprobs": [-0.25, -0.5],
                    "top_logprobs": [{"Par": -0.25, "Lon": -9999.0}, {}],
                    "text_offset": [0, 3],
                },
                "finish_reason": "length",
            },
            {"index": 1, "text": "Rome", "logprobs": None, "finish_reason": "stop"},
        ]

    def test_an_error_body_has_all_four_keys(self) -> None:
        assert protocol.render_error_body(protocol.model_not_found("gpt", "smol")) == {
            "error": {
                "message": 'model "gpt" is not served here, only "smol"; write that name, or choose another artifact',
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
        }
        server = protocol.render_error_body(StorageError("disk", code="disk_full"))
        assert server == {"error": {"message": "disk", "type": "server_error", "param": None, "code": "disk_full"}}

    def test_an_answered_line_holds_its_response(self) -> None:
        line = render_output_line(request_id="1f", custom_id="a\n", status_code=200, response='{"id":"x"}')
        assert json.loads(line) == {
            "id": "batch_req_1f",
            "custom_id": "a\n",
            "response": {"status_code": 200, "request_id": "1f", "body": {"id": "x"}},
            "error": None,
        }

    def test_a_response_is_put_under_the_id_of_its_request(self) -> None:
        """At its beginning alone: the same letters may stand in an answer."""
        quoting = '{"id":"cmpl-7","choices":[{"text":"{\\"id\\":\\"chatcmpl-7\\""}]}'
        assert protocol.with_response_id(quoting, "1f") == quoting.replace("cmpl-7", "cmpl-1f", 1)
        assert json.loads(protocol.with_response_id('{"id":"chatcmpl-7","n":1}', "1f")) == {"id": "chatcmpl-1f", "n": 1}
        for other in ('{"id":"x"}', '{"error":{"code":"a"}}', ' {"id":"cmpl-7"}', "null"):
            assert protocol.with_response_id(other, "1f") == other

    def test_a_line_that_never_ran_has_an_error_and_no_response(self) -> None:
        line = render_output_line(
            request_id="1f",
            custom_id=None,
            status_code=None,
            response=None,
            error_code="batch_cancelled",
            error_message="cancelled",
        )
        assert json.loads(line)["response"] is None
        assert json.loads(line)["error"] == {"code": "batch_cancelled", "message": "cancelled"}

    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    def test_json_stays_on_one_line_for_every_reader(self, text: str) -> None:
        """str.splitlines, which many readers use, splits at more than newlines."""
        dumped = protocol.dump_json({"text": text})
        assert len(dumped.splitlines()) == 1
        assert json.loads(dumped) == {"text": text}

    def test_context_errors_say_what_to_do(self) -> None:
        assert protocol.context_length_exceeded(2050, 2048).message == (
            "the prompt has 2050 tokens and the model's context is 2048, of which at least 1 is for the answer; "
            "shorten the prompt by 3 tokens or take a model with a longer context"
        )
        assert protocol.max_tokens_exceeds_context(100, 2000, 2048).message == (
            "max_tokens 100 and the prompt's 2000 tokens exceed the model's context of 2048; "
            "lower max_tokens to 48 or less"
        )
        assert protocol.max_tokens_exceeds_context(100, 2000, 2048, longest=2048).message.endswith("to 48 or less")
        for error in (
            protocol.context_length_exceeded(2050, 2048, longest=8192),
            protocol.max_tokens_exceeds_context(100, 2000, 2048, longest=8192),
        ):
            assert error.message.endswith(
                ", or have the workers' context raised, to 8192 at most: PROMPTMILL_ENGINE_CONTEXT_LENGTH"
            )
        assert protocol.token_out_of_vocabulary(99, 50, "prompt").message == (
            "prompt has token id 99 and the model's vocabulary ends at 49; take ids of this model's tokenizer"
        )
