"""Makes ``data/templates.json``: what transformers renders with the templates of ``templates/``.

Run in the oracle environment (requirements.txt beside this file):

    ORACLE/bin/python tests/oracle/make_templates.py

The templates use what those of model families use: namespaces, ``loop.first``, slices of the messages, macros, filters,
``raise_exception``, ``strftime_now``, ``tojson``, ``{% generation %}`` and whitespace control. A rendering is a text,
or null where the template refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import transformers
from make_greedy import DATA
from transformers.utils.chat_template_utils import render_jinja_template

TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "templates").glob("*.jinja"))
}

CHATS = [
    [("user", "Hi")],
    [("system", " Be short. "), ("user", " Hi\n"), ("assistant", "Hello "), ("user", "Bye")],
    [("user", "a"), ("assistant", "<think>\nhm\n</think>\n\nb"), ("user", "<t>c</t>")],
    [("user", "<t>c</t>"), ("assistant", "<think>\nhm\n</think>\n\nb")],
    [("user", "a"), ("user", "b")],
    [("assistant", "a")],
    [("user", "{{ 1 + 1 }}{% endfor %} é \"quoted\" <b>&amp;</b>"), ("robot", "beep")],
    [("system", "only")],
]  # fmt: skip


def rendering(template: str, chat: list[dict[str, str]], *, prompt: bool) -> str | None:
    try:
        texts, _ = render_jinja_template(
            conversations=[chat],
            chat_template=template,
            add_generation_prompt=prompt,
            bos_token="<s>",
            eos_token="</s>",
        )
    except jinja2.TemplateError:
        return None
    return texts[0]


def main() -> None:
    rows: list[dict[str, Any]] = []
    for name, template in TEMPLATES.items():
        for chat in CHATS:
            messages = [{"role": role, "content": content} for role, content in chat]
            texts = [rendering(template, messages, prompt=prompt) for prompt in (True, False)]
            rows.append({"template": name, "messages": messages, "texts": texts})
    made = {"made_with": f"transformers {transformers.__version__}", "renderings": rows}
    (DATA / "templates.json").write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    refused = sum(text is None for row in rows for text in row["texts"])
    print(f"{len(rows)} chats, {refused} refusals")


if __name__ == "__main__":
    main()
