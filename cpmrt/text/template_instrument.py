"""Changes a parsed chat template so that it calls methods of the sandbox where Jinja has no hook for them."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.visitor import NodeTransformer


class Instrument(NodeTransformer):
    """Inserts calls of the environment's methods into a parsed template.

    Each turn of a loop calls `turn`; lists, dicts, tuples and slices pass through `keep`, operands of comparisons
    through `unmarked`; the operator `~` becomes `join_text`.
    """

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
