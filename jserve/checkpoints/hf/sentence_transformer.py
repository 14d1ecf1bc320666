"""What sentence-transformers writes beside a model: modules.json, 1_Pooling/config.json, sentence_bert_config.json.

A folder without modules.json is pooled as sentence-transformers pools one: mean, not normalized.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from jserve.checkpoints.encoder import EncoderSettings
from jserve.checkpoints.hf.files import read_json, read_json_as
from jserve.checkpoints.names import resolve_member
from jserve.errors import CheckpointError, UnsupportedModel
from jserve.models.config import ModelConfig
from jserve.models.pooling import Pooling

__all__ = [
    "MODULES_NAME",
    "SETTINGS_NAMES",
    "encoder_files",
    "module_files",
    "module_settings",
    "read_encoder_settings",
]

MODULES_NAME = "modules.json"
"""What a model is made of, in such a folder."""
_SETTINGS = "config.json"
_LENGTH = "sentence_bert_config.json"
_PROMPTS = "config_sentence_transformers.json"
SETTINGS_NAMES = (MODULES_NAME, _LENGTH, _PROMPTS)
"""All that stands right beside the model's own settings and the tokenizer's."""
_TOKENIZER = "tokenizer_config.json"
_NO_LENGTH = 1 << 30
"""transformers writes 1e30 where a tokenizer knows no limit."""
_POOLINGS: Mapping[str, Literal["mean", "cls"]] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}


def read_encoder_settings(folder: Path, config: ModelConfig) -> EncoderSettings:
    """How the model that ``folder`` tells of, with the sizes of ``config``, makes vectors.

    Raises UnsupportedModel that lists all that is not built, and CheckpointError for files that are damaged.
    """
    wrong: list[str] = []
    modules = _kinds(folder, wrong)
    pooling = Pooling(
        how=_how(folder, modules, config.hidden_size, wrong) if "Pooling" in modules else "mean",
        normalize="Normalize" in modules,
    )
    lengths = read_json(folder, _LENGTH) or {}
    max_tokens = _max_tokens(folder, lengths.get("max_seq_length"), config.max_position, wrong)
    prompts = read_json(folder, _PROMPTS) or {}
    if prompts.get("default_prompt_name") is not None:
        name = str(prompts["default_prompt_name"])
        wrong.append(f"{_PROMPTS} has the default prompt {name!r}; texts with prompts before them are not built")
    if wrong:
        raise UnsupportedModel("\n  ".join([f"{folder} cannot be served:", *wrong]))
    return EncoderSettings(pooling=pooling, max_tokens=max_tokens, lowercase=lengths.get("do_lower_case") is True)


def module_files(folder: Path) -> list[Path]:
    """The settings of the modules in folders of their own, those that are there, such as ``1_Pooling/config.json``.

    Raises CheckpointError where ``modules.json`` is damaged, SourceError where it leads out of the folder.
    """
    listed = read_json_as(folder, MODULES_NAME, list[dict[str, Any]]) or []
    return [path for name in module_settings(listed) if (path := resolve_member(folder, name)).is_file()]


def module_settings(listed: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the settings of the modules in folders of their own, of those that ``modules.json`` has ``listed``."""
    inner = [module.get("path") for module in listed]
    return [f"{name}/{_SETTINGS}" for name in inner if isinstance(name, str) and name]


def encoder_files(settings: EncoderSettings, *, dimensions: int) -> dict[str, Any]:
    """JSON files that tell ``settings``, by their names: the inverse of ``read_encoder_settings``."""
    kinds = [
        ("", "Transformer"),
        ("1_Pooling", "Pooling"),
        *([("2_Normalize", "Normalize")] * settings.pooling.normalize),
    ]
    return {
        MODULES_NAME: [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(kinds)
        ],
        "1_Pooling/config.json": {
            "word_embedding_dimension": dimensions,
            **{key: how == settings.pooling.how for key, how in _POOLINGS.items()},
        },
        _LENGTH: {"max_seq_length": settings.max_tokens, "do_lower_case": settings.lowercase},
    }


def _kinds(folder: Path, wrong: list[str]) -> dict[str, str]:
    """The folders of the modules by their kind, in order: Transformer, Pooling and perhaps Normalize."""
    listed = read_json_as(folder, MODULES_NAME, list[dict[str, Any]])
    if listed is None:
        return {}
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in listed]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        built = "Transformer, Pooling, and perhaps Normalize behind"
        wrong.append(f"{MODULES_NAME} has the modules {kinds}; built: {built}")
    return {kind: str(module.get("path", "")) for kind, module in zip(kinds, listed, strict=True)}


def _how(folder: Path, modules: Mapping[str, str], dimensions: int, wrong: list[str]) -> Literal["mean", "cls"]:
    name = f"{modules['Pooling']}/{_SETTINGS}"
    settings = read_json(folder, name)
    if settings is None:
        raise CheckpointError(f"{folder / name} is missing; {MODULES_NAME} names it")
    on = sorted(key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True)
    newer = settings.get("pooling_mode")  # a word for one of them
    if isinstance(newer, str):
        on = [next((key for key, how in _POOLINGS.items() if how == newer), newer)]
    if len(on) != 1 or on[0] not in _POOLINGS:
        wrong.append(f"{name} pools by {', '.join(on) or 'nothing'}; built: one of {', '.join(_POOLINGS)}")
    size = settings.get("word_embedding_dimension", dimensions)
    if size != dimensions:
        wrong.append(f"{name} pools vectors of {size!r}; the model's have {dimensions}")
    return _POOLINGS.get(on[0], "mean") if on else "mean"


def _max_tokens(folder: Path, given: Any, max_position: int, wrong: list[str]) -> int:
    """What sentence_bert_config.json says, else the tokenizer, else the model."""
    if given is None:
        told = (read_json(folder, _TOKENIZER) or {}).get("model_max_length")
        return min(told, max_position) if isinstance(told, int) and 0 < told < _NO_LENGTH else max_position
    if not isinstance(given, int) or isinstance(given, bool) or not 1 <= given <= max_position:
        wrong.append(
            f"max_seq_length of {_LENGTH} is {given!r}; the model has positions for 1 to {max_position} tokens"
        )
        return max_position
    return given
