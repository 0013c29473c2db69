"""Only keras_mirror/seams may use names of Keras and TensorFlow that aren't public."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "keras_mirror"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent != PACKAGE / "seams"]
PRIVATE_MODULES = re.compile(r"\b(keras\.src|tensorflow\.python|tf_keras\.src|tensorflow\.keras|__internal__)\b")

# Objects of our own whose underscore names may be read: everything else that a file reads belongs to someone else.
OURS = {"self", "cls", "engine", "step"}


def underscored(tree):
    """(line, text) of every attribute `x._name` whose object isn't `self` and the like, and that the file doesn't define."""
    defined = {n.name for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    defined |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store) and is_ours(n)}
    for node in ast.walk(tree):
        private = isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr)
        if private and node.attr not in defined and not is_ours(node):
            yield node.lineno, ast.unparse(node)


def is_ours(node):
    return isinstance(node.value, ast.Name) and node.value.id in OURS


def named(tree):
    """(line, text) of private names reached by a string: getattr(x, "_name"), vars(x)["_name"], "_name" in vars(x)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr", "hasattr"):
            target, name = node.args[0], node.args[1] if len(node.args) > 1 else None
            text = name.value if isinstance(name, ast.Constant) else ""
            if isinstance(text, str) and re.match(r"_[^_]", text) and ast.unparse(target) not in OURS:
                yield node.lineno, ast.unparse(node)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_outside_the_seams_uses_a_private_name(path):
    source = path.read_text()
    tree = ast.parse(source)
    found = [f"{n}: {line.strip()}" for n, line in enumerate(source.splitlines(), 1) if PRIVATE_MODULES.search(line)]
    found += [f"{line}: {text}" for line, text in [*underscored(tree), *named(tree)]]
    assert found == [], f"{path.relative_to(PACKAGE.parent)} uses private names; move them into keras_mirror/seams"


def test_the_search_finds_what_it_is_for():
    tree = ast.parse("import x\nmodel._losses\ngetattr(metric, '_metrics', [])\nself._own\nx.__dict__\n")
    assert [text for _, text in [*underscored(tree), *named(tree)]] == ["model._losses", "getattr(metric, '_metrics', [])"]
    assert PRIVATE_MODULES.search("from keras.src import tree")
