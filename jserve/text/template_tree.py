"""Chat templates between parsing and compiling: the syntax they add to Jinja's, and the calls put into their tree."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

__all__ = ["AddTicks", "Generation"]


class Generation(Extension):
    """``{% generation %}`` marks the assistant's part for training; rendering takes its body as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class AddTicks(NodeTransformer):
    """Put a tick into everything that can repeat, and weigh every list that is written out.

    ``tick``, ``weigh`` and ``concatenated`` are methods of the environment that compiles the tree.
    """

    def _tick_body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_method("tick", [], node.lineno), lineno=node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = visit_Block = _tick_body

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _method("concatenated", node.nodes, node.lineno)

    def _weigh(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load" or node.find(nodes.Slice):
            return node
        return _method("weigh", [node], node.lineno)

    visit_List = visit_Tuple = visit_Dict = _weigh


def _method(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of the environment's own method: no template can put another in its place."""
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None, lineno=line)
