"""The package stays in pieces that can be read: short functions, short files. Kernels may be longer."""

import ast
from pathlib import Path

import pytest

import hf_linear_attn

PACKAGE = Path(hf_linear_attn.__file__).parent
FOLDERS = (
    "feature_maps",
    "layers",
    "patching",
    "parallel",
    "serving",
    "distill",
    "evaluation",
    "diagnostics",
    "export",
)
FILES = sorted(
    [
        *(path for folder in FOLDERS for path in PACKAGE.glob(f"{folder}/**/*.py")),
        *PACKAGE.glob("ops/*.py"),
        *PACKAGE.glob("*.py"),
    ]
)
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
