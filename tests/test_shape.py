"""The middle of the package stays in pieces that can be read: short functions, short files."""

import ast
from pathlib import Path

import pytest

import hf_linear_attn

PACKAGE = Path(hf_linear_attn.__file__).parent
FILES = sorted([*PACKAGE.glob("layers/**/*.py"), *PACKAGE.glob("patching/*.py"), *PACKAGE.glob("ops/*.py")])
LONGEST_FILE, LONGEST_FUNCTION = 400, 60


def code_lines(function):
    """Return the lines of a function without its docstring."""
    body = function.body
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(getattr(first, "value", None), ast.Constant)
    documented = first.end_lineno - first.lineno + 1 if is_docstring else 0
    return function.end_lineno - function.lineno + 1 - documented


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST_FILE
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    assert [node.name for node in functions if code_lines(node) > LONGEST_FUNCTION] == []
