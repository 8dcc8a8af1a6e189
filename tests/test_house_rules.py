"""The rules of the house: which way imports run, what travels to the Hub, and what is never done."""

import ast
import os
import re
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports, get_relative_imports

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "vanilla_transformer"
SOURCES = sorted(PACKAGE.rglob("*.py"))
SCRIPTS = sorted((ROOT / "train").rglob("*.py"))
HUB = sorted(PACKAGE.glob("*_vanilla_transformer.py"))
CARDS = sorted(path for path in (ROOT / "model_cards").glob("*") if path.is_dir())

CONFIGURATION, GENERATION, MODELING, PIPELINE = (
    f"{part}_vanilla_transformer" for part in ("configuration", "generation", "modeling", "pipeline")
)
# What each module may import of ours. Those that are not named sit on top.
MAY_IMPORT = {
    CONFIGURATION: set(),
    GENERATION: {CONFIGURATION},
    PIPELINE: {CONFIGURATION},
    MODELING: {CONFIGURATION, GENERATION, PIPELINE},
    "tokenizer": set(),
    "data": set(),
    "loss": set(),
    "schedule": set(),
    "checkpoint": set(),
    "claim": {"checkpoint"},
    "journal": {"checkpoint"},
    "cpu": set(),
    "recipe": {CONFIGURATION},
    "__init__": {CONFIGURATION, MODELING, PIPELINE},
}
LIBRARIES = {
    *("accelerate", "bertviz", "ctranslate2", "datasets", "evaluate", "huggingface_hub", "inseq", "numpy", "onnx"),
    *("onnxruntime", "optimum", "pandas", "peft", "pyarrow", "pytest", "requests", "rich", "ruff", "sacrebleu"),
    *("sacremoses", "safetensors", "scipy", "sentencepiece", "tensorboard", "tokenizers", "torch", "tqdm"),
    *("transformers", "typer", "vanilla_transformer", "wandb", "yaml"),
}


def name_of(path):
    return str(path.relative_to(ROOT))


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path):
    """(dots, module) of every import, wherever it stands; of `from . import x`, (1, None)."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((0, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module


def siblings_of(path):
    """The modules of ours that a file imports, by their first name."""
    for level, module in imports_of(path):
        if level:
            yield module and module.split(".")[0]
        elif module.split(".")[0] == "vanilla_transformer":
            yield ".".join(module.split(".")[1:]) or "__init__"


def run_python(code, *paths):
    """What a fresh interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


# Imports


def test_there_is_something_to_check():
    assert [path.stem for path in HUB] == [CONFIGURATION, GENERATION, MODELING, PIPELINE]
    assert set(MAY_IMPORT) <= {path.stem for path in SOURCES}


@pytest.mark.parametrize("path", [p for p in SOURCES if p.parent == PACKAGE], ids=name_of)
def test_imports_run_one_way(path):
    imported = set(siblings_of(path))
    assert imported <= MAY_IMPORT.get(path.stem, imported)
    assert "cli" not in imported


def test_no_module_imports_itself_by_a_detour():
    arrows = {path.stem: set(siblings_of(path)) for path in SOURCES if path.parent == PACKAGE}
    while leaves := {module for module, imported in arrows.items() if not imported & set(arrows)}:
        arrows = {module: imported for module, imported in arrows.items() if module not in leaves}
    assert arrows == {}


@pytest.mark.parametrize("path", HUB, ids=name_of)
def test_files_of_the_hub_import_only_what_is_there(path):
    for level, module in imports_of(path):
        if level:
            assert level == 1 and module in {hub.stem for hub in HUB}, (level, module)
        else:
            allowed = {"torch", "transformers", "huggingface_hub", *sys.stdlib_module_names}
            assert module.split(".")[0] in allowed, module


@pytest.mark.parametrize("path", HUB, ids=name_of)
def test_transformers_finds_the_same_imports_in_files_of_the_hub(path):
    # It looks for them line by line, in docstrings as well.
    assert set(get_relative_imports(path)) == {module for level, module in imports_of(path) if level}
    absolute = {module.split(".")[0] for level, module in imports_of(path) if not level}
    assert set(get_imports(path)) <= absolute


def test_the_model_carries_all_files_of_the_hub():
    assert set(siblings_of(PACKAGE / f"{MODELING}.py")) == {CONFIGURATION, GENERATION, PIPELINE}


def test_importing_the_package_needs_neither_network_nor_training_libraries():
    code = """
import socket, sys
def refuse(*args, **kwargs): raise AssertionError("network")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
import vanilla_transformer
print(*sys.modules)
"""
    loaded = run_python(code, PACKAGE.parent).split()
    ours = {module.split(".")[1] for module in loaded if module.startswith("vanilla_transformer.")}
    assert ours == {path.stem for path in HUB}
    libraries = {"datasets", "evaluate", "matplotlib", "pyarrow", "sacrebleu", "sacremoses", "tensorboard", "typer"}
    assert not libraries & set(loaded)


# Scripts


def test_nothing_in_train_is_named_like_a_library():
    names = {path.stem for path in SCRIPTS if path.parent == ROOT / "train"}
    names |= {path.parent.name for path in SCRIPTS if path.parent != ROOT / "train"}
    assert not names & (LIBRARIES | sys.stdlib_module_names)


def test_nothing_in_train_hides_a_library_from_its_scripts():
    for path in (ROOT / "train").iterdir():
        elsewhere = PathFinder.find_spec(path.stem, sys.path)
        if elsewhere is not None and elsewhere.origin is not None:
            assert PathFinder.find_spec(path.stem, [str(ROOT / "train"), *sys.path]).origin == elsewhere.origin


def test_scripts_hold_no_logic():
    assert SCRIPTS
    for path in SCRIPTS:
        if path.name == "finetune.py":  # the one that is there to be read: transformers' Trainer, and nothing of ours
            continue
        statements = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.stmt)]
        assert len(statements) <= 40, name_of(path)
        assert not [node for node in statements if isinstance(node, (ast.For, ast.While, ast.ClassDef))], name_of(path)


# Never


def documented(tree, prefix=""):
    """(name, node) of every public function, class and method."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from documented(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=name_of)
def test_modules_and_all_that_is_public_in_them_have_docstrings(path):
    tree = tree_of(path)
    assert ast.get_docstring(tree)
    assert [name for name, node in documented(tree) if not ast.get_docstring(node)] == []


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=name_of)
def test_nothing_is_unpickled(path):
    assert not {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve"} & {
        (module or "").split(".")[0] for _, module in imports_of(path)
    }
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.Call):
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if re.fullmatch(r"torch(\.serialization)?\.load", ast.unparse(node.func)):
            assert keywords.get("weights_only") == "True", f"line {node.lineno}"
        assert keywords.get("allow_pickle", "False") == "False", f"line {node.lineno}"
        assert keywords.get("trust_remote_code", "False") == "False", f"line {node.lineno}"


@pytest.mark.parametrize("path", [*SOURCES, *SCRIPTS], ids=name_of)
def test_text_files_are_read_and_written_as_utf8(path):
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) in ("read_text", "write_text"):
            assert "encoding" in {keyword.arg for keyword in node.keywords}, f"line {node.lineno}"


# Published models


@pytest.mark.parametrize("card", CARDS, ids=name_of)
def test_a_published_model_holds_the_code_as_it_is(card):
    assert {path.name for path in card.rglob("*.py")} == {path.name for path in HUB}
    for path in HUB:
        assert (card / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.parametrize("card", CARDS, ids=name_of)
def test_a_published_model_is_complete_and_holds_no_pickles(card):
    names = {path.name for path in card.rglob("*") if path.is_file()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors"} <= names
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if re.search(r"\.(bin|pt|pth|pkl|pickle|ckpt|npy|npz|joblib|h5)$", name)]
