"""Generating: prompts in, deltas out as they are made."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
from pyarrow import flight

from jserve.request import Delta
from jserve.serving.flight.batch import PromptRows
from jserve.serving.flight.command import Command
from jserve.serving.flight.deltas import DeltaOutput
from jserve.serving.flight.info import verb_info
from jserve.serving.flight.limits import FlightLimits
from jserve.serving.flight.rows import RowRunner
from jserve.serving.flight.schema import CellLimits, Columns, read_schema
from jserve.serving.flight.verb import Output, Rows, Runner
from jserve.serving.frontend import Frontend
from jserve.serving.frontends import need_embedder
from jserve.wire.columns import PROMPT_COLUMNS, SAMPLING_COLUMNS

__all__ = ["GenerateVerb"]


class GenerateVerb:
    """Implements ``jserve.serving.flight.verb.Verb``."""

    output: Output[Delta] = DeltaOutput()

    def __init__(self, frontend: Frontend, limits: FlightLimits) -> None:
        self._frontend = frontend
        self._limits = limits
        self._cells = CellLimits(
            prompt_tokens=frontend.model.max_model_len,
            # 0 where there is no tokenizer: what the frontend says of that is better than a length.
            prompt_bytes=frontend.max_prompt_bytes or limits.message_bytes,
        )

    def check(self, command: Command) -> None:
        if command.verb != "generate":
            need_embedder(self._frontend)
        self._frontend.check_model(command.model)

    def columns(self, schema: pa.Schema) -> Columns:
        return read_schema(schema, limits=self._cells)

    def rows(self, columns: Columns, command: Command) -> Rows:
        return PromptRows(columns, defaults=command.defaults)

    def runner(self, command: Command, call_id: str, *, deadline: float | None, patient: bool) -> Runner:
        return RowRunner(
            self._frontend,
            call_id=call_id,
            model=command.model,
            width=self._limits.rows_in_flight,
            deadline=deadline,
            patient=patient,
        )

    def info(self) -> flight.FlightInfo:
        about = {
            "model": dataclasses.asdict(self._frontend.model),
            "methods": ["DoExchange", "DoPut"],
            "exactly_one_of": list(PROMPT_COLUMNS),
            "input_columns": {
                "prompt": "string",
                "token_ids": "list<int32>",
                "messages": "list<struct<role: string, content: string>>",
                "id": "string",
                **{name: str(kind) for name, kind in SAMPLING_COLUMNS.items()},
            },
        }
        return verb_info("generate", self._frontend.model, self.output.schema, about)
