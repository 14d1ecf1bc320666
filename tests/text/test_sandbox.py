"""No template runs forever, fills the memory or reaches the interpreter; each ends with a TemplateError, in time."""

import re
import resource
import time

import pytest

from jserve.errors import CheckpointError, TemplateError
from jserve.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "hi"}]
START = "{% set ns = namespace(x='a', l=[1]) %}"
AGAIN = START + "{% for i in range(60) %}{% set "

FOREVER = {
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for a in range(100000) %}{% for b in range(100000) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "blocks": (
        "{% set ns = namespace(n=0) %}{% block b scoped %}{% set ns.n = ns.n + 1 %}{% if ns.n % 60 %}"
        "{{ self.b() }}{{ self.b() }}{% endif %}{% endblock %}"
    ),
    "recursive loops": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    "filters": "{% for a in range(100000) %}{{ range(100000) | map('string') | list | length }}{% endfor %}",
    "tests": "{{ range(100000) | map('default', range(100000) | list) | select('eq', range(100000) | list) | list }}",
}

TOO_BIG = {
    "text doubled by +": AGAIN + "ns.x = ns.x + ns.x %}{% endfor %}",
    "text doubled by ~": AGAIN + "ns.x = ns.x ~ ns.x %}{% endfor %}",
    "lists doubled": AGAIN + "ns.l = ns.l + ns.l %}{% endfor %}",
    "nested lists": AGAIN + "ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "nested tuples": AGAIN + "ns.l = (ns.l, ns.l) %}{% endfor %}{{ ns.l == ns.l }}",
    "nested dicts": AGAIN + "ns.l = {'a': ns.l, 'b': ns.l} %}{% endfor %}{{ ns.l | tojson }}",
    "nested dict calls": AGAIN + "ns.l = dict(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}",
    "nested by map": AGAIN + "ns.l = range(2) | map(attribute='x', default=ns.l) | list %}{% endfor %}{{ ns.l }}",
    "nested arguments": (
        START + "{% macro f(ns) %}{% set ns.l = varargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(ns, ns.l, ns.l) }}{% endfor %}{{ ns.l }}"
    ),
    "nested keywords": (
        START + "{% macro f(ns) %}{% set ns.l = kwargs %}{% endmacro %}"
        "{% for i in range(60) %}{{ f(ns, a=ns.l, b=ns.l) }}{% endfor %}{{ ns.l }}"
    ),
    "macro output": "{% macro f() %}{{ 'a' * 4000000 }}{{ 'a' * 4000000 }}{% endmacro %}{{ f() }}",
    "set blocks": AGAIN.removesuffix("{% set ")
    + "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}{% endfor %}",
    "output": "{% for i in range(100000) %}" + "a" * 64 + "{% endfor %}",
    "many large texts": START
    + "{% for i in range(100000) %}{% set ns.l = namespace(p=ns.l, d='a' * 1000000) %}{% endfor %}",
    "repetition": "{{ 'a' * 10 ** 9 }}",
    "list repetition": "{{ (10 ** 9) * [1] }}",
    "powers": "{{ 10 ** 100000 }}",
    "squares": "{% set ns = namespace(n=7) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "percent width": "{{ '%999999999d' % 1 }}",
    "percent width of a name": "{{ '%(a)999999999d' % {'a': 1} }}",
    "percent width by value": "{{ '%*d' % (999999999, 1) }}",
    "percent many": "{{ ('%s' * 1000) % ((('a' * 100000),) * 1000) }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "format width": "{{ '{:999999999}'.format(1) }}",
    "format width by value": "{{ '{:{}}'.format(1, 999999999) }}",
    "format many": "{{ ('{0}' * 1000).format('a' * 100000) }}",
    "replace": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "replace of nothing": "{{ ('a' * 100000).replace('', 'b' * 100000) }}",
    "replace filter": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "join filter": "{{ range(100000) | join('b' * 100000) }}",
    "indent": "{{ ('x\n' * 100000) | indent(10000) }}",
    "indent by text": "{{ ('x\n' * 100000) | indent('y' * 10000) }}",
    "json indent": "{{ [[[[1]]]] | tojson(indent=999999999) }}",
    "sum of lists": "{{ range(100000) | map('default', [1]) | sum(start=[]) }}",
    "range": "{{ range(10 ** 9) | list }}",
}

OUT_OF_REACH = [
    "''.__class__.__mro__",
    "''|attr('__class__')",
    "messages.append(1)",
    "messages[0].update({})",
    "messages[0].pop('role')",
    "dict.fromkeys(range(10), 1)",
    "(5).to_bytes(999999999, 'big')",
    "'a'.center(999999999)",
    "'a'.zfill(999999999)",
    "'a'.translate({97: 'b'})",
    "'{a.__class__}'.format(a='x')",
    "'{a}'.format_map({'a': 1})",
    "raise_exception.__globals__",
    "self.__init__.__globals__",
    "namespace.__init__.__globals__",
    "range.__self__",
    "lipsum(n=100000)",
    "cycler(1)",
    "'a'.encode()",
]


def render(source):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", max_seconds=0.2).render(MESSAGES)


@pytest.mark.parametrize("name", FOREVER)
def test_time_is_bounded(name):
    start = time.thread_time()
    with pytest.raises(TemplateError, match=r"ran longer than 0\.2 s|recursion"):
        render(FOREVER[name])
    assert time.thread_time() - start < 2.0


@pytest.mark.parametrize("name", TOO_BIG)
def test_size_is_bounded(name):
    start, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        TemplateError, match=r"larger than|longer than|at most|Range too big|not written out|than numbers"
    ):
        render(TOO_BIG[name])
    assert time.thread_time() - start < 2.0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB


@pytest.mark.parametrize("expression", OUT_OF_REACH)
def test_the_interpreter_is_out_of_reach(expression):
    try:
        outcome = render("{{ " + expression + " }}")
    except (TemplateError, CheckpointError) as error:
        outcome = error.message
    # Undefined is written as nothing.
    assert outcome == "" or re.search(r"unsafe|undefined|no attribute|No filter named", outcome)


def test_what_a_namespace_holds_is_not_written_out():
    assert render(AGAIN + "ns.l = namespace(a=ns.l, b=ns.l) %}{% endfor %}{{ ns.l }}") == "<namespace>"


def test_a_long_conversation_is_within_the_bounds():
    source = (
        START + "{% for m in messages %}{% if m.role == 'user' %}{% set ns.x = ns.x ~ m.content | trim %}{% endif %}"
        "{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 200}] * 1000
    text = ChatTemplate(source, bos_token="", eos_token="").render(messages)
    assert len(text) == 1000 * (len("<user>") + 1000)
