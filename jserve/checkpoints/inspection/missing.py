"""What a model has as a rule, and this one has not: what follows from that, and what to do about it."""

from __future__ import annotations

from jserve.checkpoints.checkpoint import Checkpoint
from jserve.checkpoints.inspection.report import Missing
from jserve.checkpoints.manifest import MANIFEST_NAME
from jserve.text.tokenizer import Tokenizer

__all__ = ["missing_parts", "missing_text"]


def missing_parts(checkpoint: Checkpoint) -> list[Missing]:
    """Of a checkpoint of a known family."""
    if checkpoint.encoder is not None:
        return []  # it is not opened without them
    path = checkpoint.path
    if path.is_file():
        where = "convert it (jserve convert SRC DIR --to safetensors), and put into DIR"
    elif (path / MANIFEST_NAME).exists():
        where = f"convert {checkpoint.source} again, having put beside it"
    else:
        where = f"put into {path}"
    return missing_text(
        checkpoint.tokenizer,
        has_template=checkpoint.chat_template is not None,
        eos_ids=checkpoint.eos_ids,
        where=where,
    )


def missing_text(
    tokenizer: Tokenizer | None, *, has_template: bool, eos_ids: tuple[int, ...], where: str
) -> list[Missing]:
    """What is missing of all that concerns text. ``where`` begins the sentence of what to do: "put into DIR"."""
    if tokenizer is None:
        return [
            Missing(
                what="tokenizer",
                effect="only token ids are served, no text",
                fix=f"{where} its tokenizer.json (or tokenizer.model) and tokenizer_config.json",
            )
        ]
    missing = []
    if not eos_ids:
        what = "nothing ends a text but max_tokens and stop strings"
        fix = f'{where} a tokenizer_config.json that names the eos_token, as {{"eos_token": "<eos>"}}'
        missing.append(Missing(what="end of text", effect=what, fix=fix))
    if not has_template:
        missing.append(
            Missing(
                what="chat template",
                effect="prompts are plain text; lists of messages are refused",
                fix=f"nothing, if it is no chat model; else {where} its chat_template.jinja or tokenizer_config.json",
            )
        )
    return missing
