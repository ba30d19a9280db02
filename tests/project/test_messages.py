"""Messages and docstrings point to nothing that a wheel lacks."""

from __future__ import annotations

import ast

from tests.project.test_imports import PACKAGE


def test_no_message_points_to_a_page_of_the_repository():
    """Module docstrings may: who reads those has the sources."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        module = tree.body[0].value if ast.get_docstring(tree) is not None else None
        wrong += [
            f"{path.relative_to(PACKAGE)}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and node is not module
            and isinstance(node.value, str) and "docs/" in node.value
        ]  # fmt: skip
    assert not wrong
