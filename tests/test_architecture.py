"""The house rules, read from the syntax tree: which way imports point, who owns a heavy library, and what nobody may do.

A rule is a function from one source file to its complaints. Every rule is also run on a snippet that breaks it (`BAD`): a rule that
cannot fail guards nothing.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"

# Imports point down this list; units on one row do not know each other.
ROWS = (
    ("paceline",),
    ("types", "origin"),
    ("config",),
    ("metrics", "console"),
    ("precision",),
    ("draft", "strategy"),
    ("rollout", "policy"),
    ("run",),
    ("evidence", "arena", "integrations"),
    ("session",),
    ("bench",),
    ("cli",),
)
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}

# The one place where each heavy library may be imported: a file, or a folder with a slash.
OWNERS = {
    "vllm": "rollout/",
    "ray": "run/cluster.py",
    "matplotlib": "evidence/",
    "trl": "integrations/trl.py",
    "verl": "integrations/verl.py",
    "wandb": "metrics.py",
}
ENVIRONMENT_READERS = ("cli.py",)
ENVIRONMENT_WRITERS = ("cli.py", "rollout/engine.py", "run/cluster.py")
ENVIRONMENT_WRITES = ("update", "setdefault", "pop")
UNSAFE_LIBRARIES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
LONGEST_FUNCTION = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file; `path` is relative to src/paceline, or to the project for files outside of it."""

    path: PurePosixPath
    tree: ast.Module

    @property
    def unit(self) -> str:
        """The name in ROWS that this file belongs to."""
        first = self.path.parts[0].removesuffix(".py")
        return {"__init__": "paceline", "__main__": "cli"}.get(first, first)

    @property
    def package(self) -> tuple[str, ...]:
        return ("paceline", *self.path.parts[:-1])


Rule = Callable[[Source], list[str]]


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything that is imported, lazily and through importlib too."""
    for node in ast.walk(source.tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = source.package[: len(source.package) - level + 1] if level else ()
                stem = ".".join((*base, *([module] if module else [])))
                yield from ((node.lineno, f"{stem}.{name.name}") for name in names)
            case ast.Call(func=ast.Name(id="__import__" | "import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name
            case ast.Call(func=ast.Attribute(attr="import_module"), args=[ast.Constant(value=str(name)), *_]):
                yield node.lineno, name


def imports_point_down(source: Source) -> list[str]:
    if source.unit not in LEVEL:
        return [f"{source.unit} has no row; give it one in ROWS and in the README"]
    complaints = []
    for line, name in imports(source):
        library, _, rest = name.partition(".")
        if library != "paceline":
            continue
        target = rest.split(".")[0]
        target = target if target in LEVEL else "paceline"
        if target != source.unit and LEVEL[target] >= LEVEL[source.unit]:
            complaints.append(f"{line}: {source.unit} imports {target}, which does not stand below it")
    return complaints


def heavy_libraries_have_one_owner(source: Source) -> list[str]:
    complaints = []
    for line, name in imports(source):
        owner = OWNERS.get(name.split(".")[0])
        path = str(source.path)
        if owner is None or path == owner or (owner.endswith("/") and path.startswith(owner)):
            continue
        complaints.append(f"{line}: {name} may be imported in {owner} only")
    return complaints


def nothing_is_called_utils(source: Source) -> list[str]:
    names = [part.removesuffix(".py") for part in source.path.parts]
    return [f"{name}: name it after what it holds" for name in names if name in ("util", "utils")]


def functions_are_short(source: Source) -> list[str]:
    complaints = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if length > LONGEST_FUNCTION:
                complaints.append(f"{node.lineno}: {node.name} has {length} lines; at most {LONGEST_FUNCTION}")
    return complaints


def only_cli_prints(source: Source) -> list[str]:
    if source.unit == "cli":
        return []
    return [
        f"{node.lineno}: print outside cli.py; return it, or write a metric"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def only_cli_reads_the_environment(source: Source) -> list[str]:
    path = str(source.path)
    if path in ENVIRONMENT_READERS:
        return []
    written = set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                written.add(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr=attribute))) if attribute in ENVIRONMENT_WRITES:
                written.add(value)
    complaints = [
        f"{line}: import os and write os.environ, so that its uses can be seen"
        for line, name in imports(source)
        if name in ("os.environ", "os.getenv", "os.putenv", "os.environb")
    ]
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="os"), attr="environ") if node in written:
                if path not in ENVIRONMENT_WRITERS:
                    complaints.append(f"{node.lineno}: sets an environment variable; only {ENVIRONMENT_WRITERS} do")
            case ast.Attribute(value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "putenv" as attribute):
                complaints.append(
                    f"{node.lineno}: os.{attribute}; a setting comes from the config, and cli.py reads the environment"
                )
    return complaints


def nothing_runs_foreign_code(source: Source) -> list[str]:
    """Unpickling, torch.load and trust_remote_code all execute what a file says."""
    complaints = [
        f"{line}: {name} executes what it loads" for line, name in imports(source) if name.split(".")[0] in UNSAFE_LIBRARIES
    ]
    complaints += [f"{line}: torch.load unpickles; use safetensors" for line, name in imports(source) if name == "torch.load"]
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="load"):
                complaints.append(f"{node.lineno}: torch.load unpickles; use safetensors")
            case ast.keyword(arg="trust_remote_code", value=value):
                if not (isinstance(value, ast.Constant) and value.value is False):
                    complaints.append(f"{value.lineno}: trust_remote_code must be False")
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    named = isinstance(key, ast.Constant) and key.value == "trust_remote_code"
                    if named and not (isinstance(value, ast.Constant) and value.value is False):
                        complaints.append(f"{value.lineno}: trust_remote_code must be False")
    return complaints


def modules_say_what_they_are_for(source: Source) -> list[str]:
    return [] if ast.get_docstring(source.tree) else ["1: the first line of a module says what it is for"]


RULES: tuple[Rule, ...] = (
    imports_point_down,
    heavy_libraries_have_one_owner,
    nothing_is_called_utils,
    functions_are_short,
    only_cli_prints,
    only_cli_reads_the_environment,
    nothing_runs_foreign_code,
    modules_say_what_they_are_for,
)
RULES_EVERYWHERE: tuple[Rule, ...] = (functions_are_short, nothing_is_called_utils, modules_say_what_they_are_for)


def read(file: Path, *, base: Path) -> Source:
    return Source(path=PurePosixPath(file.relative_to(base).as_posix()), tree=ast.parse(file.read_text(encoding="utf-8")))


@cache
def package() -> tuple[Source, ...]:
    sources = tuple(read(file, base=PACKAGE) for file in sorted(PACKAGE.rglob("*.py")))
    assert len(sources) > 10, "the package was not found, so nothing would be checked"
    return sources


def snippet(path: str, text: str) -> Source:
    return Source(path=PurePosixPath(path), tree=ast.parse(text))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Rule) -> None:
    assert [f"{source.path}:{complaint}" for source in package() for complaint in rule(source)] == []


@pytest.mark.parametrize("rule", RULES_EVERYWHERE, ids=lambda rule: rule.__name__)
def test_other_code_keeps_rule(rule: Rule) -> None:
    files = [file for folder in ("tests", "scripts", "examples") for file in sorted((ROOT / folder).rglob("*.py"))]
    sources = [read(file, base=ROOT) for file in files]
    assert [f"{source.path}:{complaint}" for source in sources for complaint in rule(source)] == []


LONG = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION

BAD = (
    (imports_point_down, "types.py", "from paceline.config import Config"),
    (imports_point_down, "metrics.py", "import paceline.run.loop"),
    (imports_point_down, "rollout/engine.py", "from ..policy import learner"),
    (imports_point_down, "rollout/engine.py", "from paceline.policy.learner import FsdpLearner"),
    (imports_point_down, "run/loop.py", "def f():\n    from paceline import arena"),
    (imports_point_down, "run/loop.py", "if TYPE_CHECKING:\n    from paceline.evidence.measure import Result"),
    (imports_point_down, "evidence/report.py", "from paceline.arena.task import Problem"),
    (imports_point_down, "console.py", "from paceline.metrics import Sink"),
    (imports_point_down, "arena/task.py", "importlib.import_module('paceline.bench.sync')"),
    (imports_point_down, "bench/sync.py", "from paceline.cli import main"),
    (imports_point_down, "__init__.py", "from paceline.types import Rollout"),
    (imports_point_down, "stray.py", "x = 1"),
    (heavy_libraries_have_one_owner, "run/loop.py", "import vllm"),
    (heavy_libraries_have_one_owner, "policy/learner.py", "from vllm.config import VllmConfig"),
    (heavy_libraries_have_one_owner, "rollouts.py", "import vllm"),
    (heavy_libraries_have_one_owner, "run/loop.py", "def f():\n    import ray"),
    (heavy_libraries_have_one_owner, "run/loop.py", "import_module('ray.actor')"),
    (heavy_libraries_have_one_owner, "bench/sync.py", "from matplotlib import pyplot"),
    (heavy_libraries_have_one_owner, "integrations/verl.py", "import trl"),
    (heavy_libraries_have_one_owner, "cli.py", "import wandb"),
    (nothing_is_called_utils, "rollout/utils.py", ""),
    (nothing_is_called_utils, "utils/names.py", ""),
    (functions_are_short, "run/loop.py", LONG),
    (functions_are_short, "run/loop.py", "class A:\n" + "".join(f"    {line}\n" for line in ("async " + LONG).splitlines())),
    (only_cli_prints, "run/loop.py", "print('step')"),
    (only_cli_reads_the_environment, "run/loop.py", "x = os.environ['HOME']"),
    (only_cli_reads_the_environment, "run/loop.py", "x = os.environ.get('HOME')"),
    (only_cli_reads_the_environment, "run/loop.py", "x = os.getenv('HOME')"),
    (only_cli_reads_the_environment, "run/loop.py", "from os import environ"),
    (only_cli_reads_the_environment, "run/loop.py", "os.environ['A'] = 'b'"),
    (only_cli_reads_the_environment, "run/loop.py", "os.environ.update(A='b')"),
    (only_cli_reads_the_environment, "rollout/engine.py", "x = os.environ['HOME']"),
    (only_cli_reads_the_environment, "run/cluster.py", "x = os.environ.pop('HOME')"),
    (nothing_runs_foreign_code, "run/checkpoint.py", "import pickle"),
    (nothing_runs_foreign_code, "run/cluster.py", "from ray import cloudpickle\nfrom cloudpickle import dumps"),
    (nothing_runs_foreign_code, "run/checkpoint.py", "torch.load('x', weights_only=True)"),
    (nothing_runs_foreign_code, "run/checkpoint.py", "from torch import load"),
    (nothing_runs_foreign_code, "rollout/engine.py", "EngineArgs(trust_remote_code=True)"),
    (nothing_runs_foreign_code, "rollout/engine.py", "EngineArgs(trust_remote_code=config.trust)"),
    (nothing_runs_foreign_code, "rollout/engine.py", "settings = {'trust_remote_code': True}"),
    (modules_say_what_they_are_for, "run/loop.py", "x = 1\n'too late'"),
)

GOOD = (
    (imports_point_down, "run/cluster.py", "from paceline.rollout.engine import VllmEngine"),
    (imports_point_down, "run/cluster.py", "from . import loop\nfrom ..config import Config"),
    (imports_point_down, "bench/sync.py", "from paceline.evidence.measure import Result\nfrom paceline.arena import policy"),
    (imports_point_down, "cli.py", "from paceline import __version__\nfrom paceline.bench import sync\nimport numpy"),
    (heavy_libraries_have_one_owner, "rollout/engine.py", "from vllm import SamplingParams"),
    (heavy_libraries_have_one_owner, "run/cluster.py", "import ray\nfrom ray.util import placement_group"),
    (heavy_libraries_have_one_owner, "run/loop.py", "import rayon"),
    (functions_are_short, "run/loop.py", LONG.removesuffix("    x = 1\n")),
    (only_cli_prints, "cli.py", "print('step')"),
    (only_cli_reads_the_environment, "cli.py", "x = os.environ.get('HOME')"),
    (only_cli_reads_the_environment, "rollout/engine.py", "os.environ['A'] = 'b'\nos.environ.setdefault('A', 'b')"),
    (nothing_runs_foreign_code, "rollout/engine.py", "EngineArgs(trust_remote_code=False)\nsafetensors.torch.load_file('x')"),
)


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_bites(rule: Rule, path: str, text: str) -> None:
    assert len(rule(snippet(path, text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert rule(snippet(path, text)) == []


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


# What a distribution of one name brings under another.
BROUGHT_BY = {"pydantic_core": "pydantic"}


def declared() -> set[str]:
    """Distributions that pyproject.toml names, in the dependencies and in the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in lines} - {"paceline"}


def test_every_imported_library_is_declared() -> None:
    """Otherwise an installation by range works only where something else happens to bring it."""
    imported = {name.split(".")[0] for source in package() for _, name in imports(source)} - {"paceline"} - sys.stdlib_module_names
    assert {BROUGHT_BY.get(name, name) for name in imported} - declared() == set()


def test_every_declared_library_has_its_reason() -> None:
    documented = set(
        re.findall(r"^\|(?: `\w+` \|)? ([\w-]+) \| `", (ROOT / "docs/dependencies.md").read_text(encoding="utf-8"), re.MULTILINE)
    )
    assert documented == declared()


def test_lock_pins_every_wheel_by_hash_and_names_no_origin() -> None:
    """One line without a hash, or with an index of its own, and the environment is no longer the one that was tested."""
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert re.fullmatch(r"([a-z0-9-]+==[\w.+]+ \\\n    --hash=sha256:[0-9a-f]{64}\n)+", text), (
            f"{file.name}: see scripts/lock-cpu.py"
        )


def tree_of(readme: str) -> dict[str, str]:
    """Path under src/paceline -> its line, from the block between the tree markers. Four characters are one level."""
    block = re.search(r"<!-- tree -->\n```\n(.*?)```\n<!-- /tree -->", readme, flags=re.DOTALL)
    assert block, "README.md: the tree stands between <!-- tree --> and <!-- /tree -->"
    first, *lines = block[1].splitlines()
    assert first.split()[0] == "src/paceline/"
    files: dict[str, str] = {}
    folders: list[str] = []
    for line in lines:
        entry = re.fullmatch(r"((?:[│├└─ ]{4})+)(\S+)\s*(.*)", line)
        assert entry, f"README.md: not a line of a tree: {line!r}"
        bars, name, words = entry.groups()
        del folders[len(bars) // 4 - 1 :]
        if name.endswith("/"):
            folders.append(name)
        else:
            path = "".join(folders) + name
            assert path not in files, f"README.md: {path} is named twice"
            files[path] = words
    return files


def test_readme_tree_names_every_file_and_no_other() -> None:
    """A folder's line stands for its __init__.py."""
    files = tree_of((ROOT / "README.md").read_text(encoding="utf-8"))
    real = {file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*.py") if file.name != "__init__.py"}
    assert {"in the README only": sorted(set(files) - real), "missing in the README": sorted(real - set(files))} == {
        "in the README only": [],
        "missing in the README": [],
    }
    assert [path for path, words in files.items() if not words] == [], "every file gets its line"


def test_tree_reader_follows_folders() -> None:
    lines = ("src/paceline/", "├── a.py    one", "├── run/    WHO", "│   └── b.py  two", "└── cli.py  three")
    readme = "\n".join(("<!-- tree -->", "```", *lines, "```", "<!-- /tree -->"))
    assert tree_of(readme) == {"a.py": "one", "run/b.py": "two", "cli.py": "three"}
