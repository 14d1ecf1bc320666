"""Templates render as Hugging Face renders them; a refusal is the template's own words, not an internal error."""

import json
import threading
from datetime import datetime
from pathlib import Path

import pytest

from jserve.errors import CheckpointError, TemplateError
from jserve.testing.tokenizer import CHAT_TEMPLATE
from jserve.text.chat_template import ChatTemplate

ORACLE = Path(__file__).parent.parent / "oracle"
RENDERINGS = json.loads((ORACLE / "data" / "templates.json").read_text(encoding="utf-8"))["renderings"]

USER = {"role": "user", "content": "hi"}
BOT = {"role": "assistant", "content": " hello "}

# As SmolLM2 has it.
CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The rules of Gemma and Mistral: turns alternate, no system.
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% set role = 'model' if message.role == 'assistant' else message.role %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
)


def template(source, **bounds):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **bounds)


def render(source, messages=(USER,), **kwargs):
    return template(source).render(list(messages), **kwargs)


def test_chatml():
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    assert render(CHATML) == system + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == system + "<|im_start|>user\nhi<|im_end|>\n"


def test_strict_turns():
    assert render(STRICT, [USER, BOT, USER]) == (
        "<s><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nhello<end_of_turn>\n"
        "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n"
    )


@pytest.mark.parametrize("name", sorted({row["template"] for row in RENDERINGS}))
def test_templates_in_the_styles_of_families_render_as_transformers_does(name):
    made = template((ORACLE / "templates" / f"{name}.jinja").read_text(encoding="utf-8"))
    for row in (row for row in RENDERINGS if row["template"] == name):
        for text, prompt in zip(row["texts"], (True, False), strict=True):
            if text is None:
                with pytest.raises(TemplateError):
                    made.render(row["messages"], add_generation_prompt=prompt)
            else:
                assert made.render(row["messages"], add_generation_prompt=prompt) == text


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (STRICT, [USER, USER], "refused the messages: Conversation roles must alternate user/assistant"),
        (STRICT, [{"role": "system", "content": "x"}, USER], "refused the messages: System role not supported"),
        (STRICT, [], "list object has no element 0"),
        (CHAT_TEMPLATE, [{"role": "robot", "content": "x"}], "unknown role robot"),
        ("{{ messages[0].content.name.first }}", [USER], "has no attribute 'name'"),
        ("{{ 1 // 0 }}", [USER], "failed: integer division or modulo by zero"),
        ("{{ raise_exception('x' * 5000) }}", [USER], r"x{500}\.\.\.$"),
        ("{% include 'other' %}", [USER], "no loader"),
    ],
)
def test_a_refusal_gives_the_reason(source, messages, words):
    with pytest.raises(TemplateError, match=words):
        render(source, messages)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        ("{{ {'a': '<é>', 'b': [1]} | tojson }}", '{"a": "<é>", "b": [1]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": 2\n}'),
        ("{{ {'b': 1, 'a': 'é'} | tojson(ensure_ascii=true, sort_keys=true) }}", '{"a": "\\u00e9", "b": 1}'),
        ("{{ [1] | tojson(separators=(',', ':')) }}", "[1]"),
        (
            "{% for m in messages * 3 %}{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
            "hihi",
        ),
        ("{% for i in range(4) %}{% if i is odd %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "hi!"),
        ("{% if not tools and documents is none %}{{ bos_token ~ eos_token ~ 1 }}{% endif %}", "<s></s>1"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        (
            "{% macro turn(m) %}[{{ m.role }}]{{ caller() }}{% endmacro %}{% call turn(messages[0]) %}x{% endcall %}",
            "[user]x",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}", "hi"),
        ("{{ messages[0].content.replace('h', 'H').upper().split('I') }}", "['H', '']"),
        (
            "{{ '%s is %5.1f' % ('pi', 3.14159) }}|{{ '{:>4}'.format(7) }}|{{ '%03d' | format(7) }}",
            "pi is   3.1|   7|007",
        ),
        (
            "{{ 'a\nb' | indent(2) }}|{{ '-'.join(['a', 'b']) }}|{{ [3, 4] | sum }}|{{ dict(a=1).get('a') }}",
            "a\n  b|a-b|7|1",
        ),
        (
            "{{ messages[::-1][0].get('name', 'none') }} {{ messages | length }} {{ 2 ** 10 }} {{ 7 % 4 }}",
            "none 1 1024 3",
        ),
        ("{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}", "role=user;content=hi;"),
        ("{% for a, b in [(1, 2), (3, 4)] %}{{ a * b }} {% endfor %}{{ (1, 2)[0] }}{{ 'abc'[1:] }}", "2 12 1bc"),
        ("{% block body %}{{ messages[0].content }}{% endblock %}{{ self.body() }}", "hihi"),
        ("{% set x %}{{ 1 }}{{ 2 }}{% endset %}{% filter upper %}a{{ x }}{% endfilter %}", "A12"),
    ],
)
def test_what_templates_use(source, text):
    assert render(source) == text


def test_the_date():
    assert render("{{ strftime_now('%Y-%m-%d') }}") in {
        str(datetime.now().date()),
        render("{{ strftime_now('%Y-%m-%d') }}"),
    }
    with pytest.raises(TemplateError, match="without digits"):
        render("{{ strftime_now('%9999999d') }}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("a\n{% if %}", "line 2 of the chat template"),
        ("{{ x | teleport }}", "No filter named 'teleport'"),
        ("{% for a in x %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "cannot be compiled"),
        ("x" * (1 << 20) + "y", "1048577 characters"),
    ],
)
def test_what_does_not_compile_is_the_checkpoints_fault(source, words):
    with pytest.raises(CheckpointError, match=words):
        template(source)


def test_the_caller_s_messages_are_not_changed():
    messages = [dict(USER)]
    with pytest.raises(TemplateError, match="append"):
        render("{{ messages.append(1) }}", messages)
    with pytest.raises(TemplateError, match="update"):
        render("{{ messages[0].update({'role': 'x'}) }}", messages)
    assert messages == [USER]


def test_threads_have_budgets_of_their_own():
    slow = template("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}", max_seconds=5.0)
    out = []
    threads = [
        threading.Thread(target=lambda i=i: out.append(slow.render([{"role": "user", "content": str(i)}])))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(out) == ["0", "1", "2", "3"]
