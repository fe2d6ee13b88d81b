"""Chats are written as the model was taught, and a template reaches nothing but the messages."""

from datetime import datetime
from typing import Any

import pytest

from storage.errors import InvalidRequest
from workers.chat_template import ChatTemplate, builtin_template
from workers.models.errors import ArtifactError

USER = {"role": "user", "content": "Hi"}


def compile_template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", clock=lambda: datetime(2026, 11, 30, 12, 0))


def render_llama2(*messages: dict[str, Any]) -> str:
    return compile_template(builtin_template("llama2")).render(messages)


def test_llama2_format_is_metas() -> None:
    """`[INST] <<SYS>>` of the reference code, BOS before and EOS after each finished turn."""
    assert render_llama2(USER) == "<s>[INST] Hi [/INST]"
    assert render_llama2({"role": "system", "content": "Be brief."}, USER) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]"
    )
    answer = {"role": "assistant", "content": " Hello! "}
    assert render_llama2(USER, answer, {"role": "user", "content": "Bye"}) == (
        "<s>[INST] Hi [/INST] Hello! </s><s>[INST] Bye [/INST]"
    )


@pytest.mark.parametrize(
    "messages",
    [
        [USER, USER],
        [{"role": "assistant", "content": "Hi"}],
        [{"role": "tool", "content": "Hi"}],
        [USER, {"role": "system", "content": "Be brief."}],
    ],
)
def test_llama2_format_refuses_roles_out_of_order(messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render_llama2(*messages)
    assert refusal.value.code == "invalid_messages"
    assert refusal.value.param == "body.messages"
    assert "role" in refusal.value.message


def test_a_model_without_a_format_gets_a_dialogue() -> None:
    template = compile_template(builtin_template("plain"))
    messages = [{"role": "system", "content": "Be brief."}, USER]
    assert template.render(messages) == "System: Be brief.\nUser: Hi\nAssistant:"
    assert template.render([USER], add_generation_prompt=False) == "User: Hi\n"


def test_templates_run_in_the_environment_they_were_written_for() -> None:
    """Trimmed blocks, loop controls, the generation tag, tojson without HTML escapes, the date."""
    template = compile_template(
        "{% for m in messages %}\n    {% if loop.index > 1 %}{% break %}{% endif %}\n{{ m | tojson }}\n{% endfor %}\n"
        "{% generation %}{{ strftime_now('%d %b %Y') }}{% endgeneration %}{{ bos_token + eos_token }}"
    )
    rendered = template.render([{"role": "user", "content": "<é> & 'x'"}, USER])
    assert rendered == '{"role": "user", "content": "<é> & \'x\'"}\n30 Nov 2026<s></s>'


def test_tools_and_further_variables_reach_the_template() -> None:
    template = compile_template("{{ tools | tojson if tools else 'none' }} {{ enable_thinking }}")
    assert template.render([USER], variables={"enable_thinking": False}) == "none False"
    assert template.render([USER], tools=[{"name": "f"}]).startswith('[{"name": "f"}]')


def test_what_a_caller_passes_cannot_pose_as_the_messages() -> None:
    template = compile_template("{{ messages[0].content }}{{ bos_token }}")
    assert template.render([USER], variables={"messages": [], "bos_token": "x"}) == "Hi<s>"


def test_content_in_parts_is_joined() -> None:
    template = compile_template("{{ messages[0].content }}")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert template.render([{"role": "user", "content": parts}]) == "one two"
    assert template.render([{"role": "assistant", "content": None}]) == ""
    for part, kind in (
        ({"type": "image_url", "image_url": {}}, "image_url"),
        ("text", "str"),
        ({"type": "text"}, "text"),
    ):
        with pytest.raises(InvalidRequest, match=f"content part 0 has type {kind}; this model reads text only"):
            template.render([{"role": "user", "content": [part]}])


def test_a_template_error_is_the_requests_alone() -> None:
    template = compile_template("{{ raise_exception('no system role') if messages[0].role == 'system' else 'fine' }}")
    with pytest.raises(InvalidRequest, match="no system role"):
        template.render([{"role": "system", "content": "x"}])
    assert template.render([USER]) == "fine"
    with pytest.raises(InvalidRequest):
        compile_template("{{ messages[5].content.upper() }}").render([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ strftime_now.__code__.co_code }}",
        "{{ '%s'.format.__self__.upper() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    """Templates come with downloaded files: no way to Python's inside or to endless work."""
    with pytest.raises(InvalidRequest):
        compile_template(source).render([USER])


def test_a_template_that_is_not_jinja_is_the_artifacts_fault() -> None:
    with pytest.raises(ArtifactError, match="does not compile"):
        compile_template("{% for %}")
