"""Small bugs of the kind people make: a comparison the wrong way round, a number off by one, two arguments swapped.

Knows Python source of ASCII characters and its syntax tree; knows nothing of documents, questions or models. Every edit
changes one place of one line and leaves a program that can be parsed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

MAX_NUMBER = 1000  # larger ones are tables and masks, not counts
DESCRIPTIONS = {
    "comparison": "a comparison is the wrong way round",
    "number": "a number is off by one",
    "operator": "a wrong operator is used to compute a value",
    "condition": "a condition is negated that should not be, or the other way round",
    "junction": "'and' and 'or' are mixed up",
    "arguments": "two arguments of a call are swapped",
    "variable": "the wrong variable is used",
    "truth": "True and False are mixed up",
}
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", ">"),
    ast.Gt: (">", "<"),
    ast.LtE: ("<=", ">="),
    ast.GtE: (">=", "<="),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}


@dataclass(frozen=True, order=True)
class Edit:
    """Characters [start, end) of line ``line``, counted from 0, become ``text``."""

    line: int
    start: int
    end: int
    text: str
    kind: str

    def applied(self, line: str) -> str:
        return line[: self.start] + self.text + line[self.end :]


def edits(source: str) -> list[Edit]:
    """Every bug that can be planted, in the order of the source. Raises SyntaxError."""
    tree, lines = ast.parse(source), source.split("\n")
    found: set[Edit] = set()
    for node in _walk(tree):
        for kind, rule in RULES:
            if isinstance(node, kind):
                found.update(rule(node, lines))
    return sorted(edit for edit in found if edit.applied(lines[edit.line]) != lines[edit.line])


def statement_lines(source: str) -> set[int]:
    """Lines, counted from 0, on which a statement begins, docstrings left out. Raises SyntaxError."""
    return {
        node.lineno - 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.stmt) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    }


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """``node`` and all below it but the insides of f-strings, whose positions mean little before Python 3.12."""
    yield node
    if not isinstance(node, ast.JoinedStr):
        for child in ast.iter_child_nodes(node):
            yield from _walk(child)


def _on_one_line(*nodes: ast.expr) -> bool:
    return len({line for node in nodes for line in (node.lineno, node.end_lineno)}) == 1


def _replaced(left: ast.expr, right: ast.expr, tokens: tuple[str, str], lines: Sequence[str], kind: str) -> list[Edit]:
    """The operator between two operands, ``tokens[0]``, becomes ``tokens[1]``."""
    if not _on_one_line(left, right):
        return []
    at, (old, new) = left.end_col_offset or 0, tokens
    between = re.search(rf"(?<![\w<>=!]){re.escape(old)}(?![\w=])", lines[left.lineno - 1][at : right.col_offset])
    if between is None:
        return []
    return [Edit(left.lineno - 1, at + between.start(), at + between.end(), new, kind)]


def _comparison(node: ast.Compare, lines: Sequence[str]) -> list[Edit]:
    if len(node.ops) != 1:
        return []
    return _replaced(node.left, node.comparators[0], COMPARISONS[type(node.ops[0])], lines, "comparison")


def _operator(node: ast.BinOp, lines: Sequence[str]) -> list[Edit]:
    texts = any(
        isinstance(n, ast.JoinedStr) or isinstance(getattr(n, "value", 0), str) for n in (node.left, node.right)
    )
    tokens = OPERATORS.get(type(node.op))
    return [] if texts or tokens is None else _replaced(node.left, node.right, tokens, lines, "operator")


def _junction(node: ast.BoolOp, lines: Sequence[str]) -> list[Edit]:
    if len(node.values) != 2:
        return []
    tokens = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    return _replaced(node.values[0], node.values[1], tokens, lines, "junction")


def _constant(node: ast.Constant, lines: Sequence[str]) -> list[Edit]:
    line, start, end = node.lineno - 1, node.col_offset, node.end_col_offset or 0
    if isinstance(node.value, bool):
        return [Edit(line, start, end, str(not node.value), "truth")]
    number = isinstance(node.value, int) and node.value <= MAX_NUMBER and lines[line][start:end] == str(node.value)
    return [Edit(line, start, end, str(int(node.value) + 1), "number")] if number else []


def _condition(node: ast.If | ast.While, lines: Sequence[str]) -> list[Edit]:
    test = node.test
    if not _on_one_line(test):
        return []
    line, start, end = test.lineno - 1, test.col_offset, test.end_col_offset or 0
    text = lines[line][start:end]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return [Edit(line, start, end, lines[line][test.operand.col_offset : end], "condition")]
    if isinstance(test, ast.Name | ast.Attribute | ast.Call | ast.Subscript):
        return [Edit(line, start, end, f"not {text}", "condition")]
    return [Edit(line, start, end, f"not ({text})", "condition")] if isinstance(test, ast.BoolOp) else []


def _arguments(node: ast.Call, lines: Sequence[str]) -> list[Edit]:
    if len(node.args) < 2 or any(isinstance(arg, ast.Starred | ast.GeneratorExp) for arg in node.args[:2]):
        return []
    first, second = node.args[:2]
    if not _on_one_line(first, second):
        return []
    line, start, end = lines[first.lineno - 1], first.col_offset, second.end_col_offset or 0
    between = line[first.end_col_offset : second.col_offset]
    swapped = line[second.col_offset : end] + between + line[start : first.end_col_offset]
    return [Edit(first.lineno - 1, start, end, swapped, "arguments")]


def _variable(node: ast.FunctionDef, lines: Sequence[str]) -> list[Edit]:
    """A parameter is used in place of the one before it."""
    names = [arg.arg for arg in node.args.args if arg.arg not in ("self", "cls")]
    if len(names) < 2:
        return []
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    return [
        Edit(used.lineno - 1, used.col_offset, used.end_col_offset or 0, following[used.id], "variable")
        for statement in node.body
        for used in _walk(statement)
        if isinstance(used, ast.Name) and isinstance(used.ctx, ast.Load) and used.id in following
    ]


Rule = Callable[..., list[Edit]]
RULES: list[tuple[type[ast.AST] | tuple[type[ast.AST], ...], Rule]] = [
    (ast.Compare, _comparison),
    (ast.BinOp, _operator),
    (ast.BoolOp, _junction),
    (ast.Constant, _constant),
    ((ast.If, ast.While), _condition),
    (ast.Call, _arguments),
    (ast.FunctionDef, _variable),
]
