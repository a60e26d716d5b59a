"""Changes a parsed chat template so that what it does passes the sandbox's own methods, where Jinja has no hook."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class Instrument(NodeTransformer):
    """Puts the environment's `turn`, `keep`, `join_text` and `unmarked` into a parsed template."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("turn", [], node), lineno=node.lineno))
        return node

    def _kept(self, node: nodes.Expr) -> nodes.Node:
        self.generic_visit(node)
        return _call("keep", [node], node)

    visit_List = visit_Dict = _kept

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._kept(node) if node.ctx == "load" else self.generic_visit(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        return self._kept(node) if isinstance(node.arg, nodes.Slice) else self.generic_visit(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("unmarked", [node.expr], node)
        for operand in node.ops:
            operand.expr = _call("unmarked", [operand.expr], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("join_text", node.nodes, node)


def _call(method: str, args: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    function = nodes.EnvironmentAttribute(method, lineno=at.lineno)
    return nodes.Call(function, args, [], None, None, lineno=at.lineno)
