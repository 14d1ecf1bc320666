"""What the contract checker has to say."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Finding", "merged"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong with a module. ``str`` of it is for reading."""

    severity: Literal["error", "warning"]
    """error: it cannot be served, or would answer wrongly. warning: it can, at a price."""
    where: str
    """A method or a place in it: "embed", "layer 3 before attend (k)"."""
    what: str
    fix: str
    """What to do."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.where}: {self.what}\n  fix: {self.fix}"


def merged(findings: Sequence[Finding]) -> list[Finding]:
    """Errors first; what is said of several layers in the same words is said once."""
    groups: dict[Finding, list[int]] = {}
    for finding in findings:
        layer = re.match(r"layer (\d+)\b", finding.where)
        if layer is None:
            groups.setdefault(finding, [])
        else:
            general = replace(finding, where=f"layer {{}}{finding.where[layer.end() :]}")
            groups.setdefault(general, []).append(int(layer[1]))
    whole = [replace(finding, where=finding.where.replace("{}", _span(layers))) for finding, layers in groups.items()]
    return sorted(whole, key=lambda finding: finding.severity)


def _span(layers: list[int]) -> str:
    if len(layers) > 2 and layers == list(range(layers[0], layers[-1] + 1)):
        return f"{layers[0]} to {layers[-1]}"
    return ", ".join(map(str, layers))
