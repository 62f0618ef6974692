"""The house rules, read from the syntax tree: which way imports point, who owns a heavy library, and what nobody may
do.

A rule is a function from one source file to its complaints. Every rule is also run on a snippet that breaks it (`BAD`):
a rule that cannot fail guards nothing.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    ("config",),
    ("types",),
    ("files", "context", "fp8", "devices"),
    ("assets",),
    ("metrics", "measure", "monitor"),
    ("selector", "drafters", "weights", "console", "sinks"),
    ("rollout", "learner"),
    ("orchestrator",),
    ("arena", "cluster", "report"),
    ("plan", "certify", "integrations"),
    ("sessions",),
    ("doctor", "demo"),
    ("cli",),
)
LEVEL = {unit: level for level, row in enumerate(ROWS) for unit in row}

# Where each heavy library may be imported: a file, or a folder with a slash.
OWNERS = {
    "vllm": ("rollout/",),
    "ray": ("cluster/",),
    "jinja2": ("report/render.py",),
    "matplotlib": ("report/",),
    "trl": ("integrations/trl.py",),
    "verl": ("integrations/verl.py",),
    "wandb": ("sinks.py",),
}
ENVIRONMENT_WRITERS = ("rollout/arguments.py", "cluster/ray_session.py")
ENVIRONMENT_READERS = {"rollout/plugin.py": "PACELINE"}
"""A variable that is read outside of cli/: hosts do not call us, vLLM does."""
ENVIRONMENT_WRITES = ("update", "setdefault", "pop")
UNSAFE_LIBRARIES = ("pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib")
LONGEST_FUNCTION = 80
LONGEST_FILE = 400
SHORT_FILES = {"orchestrator/loop.py": 200}
FILES = "files.py"
DEVICES = "devices.py"
INTERNALS = "rollout/internals/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One Python file; `path` is relative to src/paceline, or to the project for files outside of it."""

    path: PurePosixPath
    tree: ast.Module
    num_lines: int

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
        return [f"{source.unit} has no row; give it one in ROWS and in docs/architecture.md"]
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
        owners = OWNERS.get(name.split(".")[0])
        path = str(source.path)
        if owners is None or any(path == owner or (owner.endswith("/") and path.startswith(owner)) for owner in owners):
            continue
        complaints.append(f"{line}: {name} may be imported in {' and '.join(owners)} only")
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
        f"{node.lineno}: print outside cli/; return it, or write a metric"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def only_cli_reads_the_environment(source: Source) -> list[str]:
    if source.unit == "cli":
        return []
    path = str(source.path)
    written, read = set(), set()
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[ast.Constant(value=str(variable))]) if (
                ENVIRONMENT_READERS.get(path) == variable
            ):
                read.add(value)
            case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
                written.add(value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=value, attr=attribute))) if (
                attribute in ENVIRONMENT_WRITES
            ):
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
            case ast.Attribute(
                value=ast.Name(id="os"), attr="environ" | "environb" | "getenv" | "putenv" as attribute
            ) if node not in read:
                complaints.append(
                    f"{node.lineno}: os.{attribute}; a setting comes from the config, and cli/ reads the environment"
                )
    return complaints


def nothing_runs_foreign_code(source: Source) -> list[str]:
    """Unpickling, torch.load and trust_remote_code all execute what a file says."""
    complaints = [
        f"{line}: {name} executes what it loads"
        for line, name in imports(source)
        if name.split(".")[0] in UNSAFE_LIBRARIES
    ]
    complaints += [
        f"{line}: torch.load unpickles; use safetensors" for line, name in imports(source) if name == "torch.load"
    ]
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


def nothing_outside_of_the_wheel_is_imported(source: Source) -> list[str]:
    names = [(line, name) for line, name in imports(source) if name.split(".")[0] in ("benchmarks", "scripts", "tests")]
    return [f"{line}: imports {name}, which is not in the wheel" for line, name in names]


def files_are_short(source: Source) -> list[str]:
    longest = SHORT_FILES.get(str(source.path), LONGEST_FILE)
    return [f"1: {source.num_lines} lines; at most {longest}"] if source.num_lines > longest else []


def one_atomic_write(source: Source) -> list[str]:
    """`path.replace(other)` and `path.rename(other)` take one argument, `text.replace` takes two."""
    if str(source.path) == FILES:
        return []
    complaints = []
    for node in ast.walk(source.tree):
        match node:
            case (
                ast.Call(func=ast.Attribute(attr="replace" | "rename"), args=[_], keywords=[])
                | ast.Call(func=ast.Attribute(value=ast.Name(id="os"), attr="replace" | "rename" | "renames"))
                | ast.Call(func=ast.Attribute(value=ast.Name(id="shutil"), attr="move"))
            ):
                complaints.append(f"{node.lineno}: moves a file into place; {FILES} does that")
    return complaints


def one_checksum_and_one_lock(source: Source) -> list[str]:
    """hashlib.blake2b stays free: it chooses held-out problems and is no checksum of a file."""
    if str(source.path) == FILES:
        return []
    complaints = [
        f"{line}: imports {name}; checksums and locks are made in {FILES}"
        for line, name in imports(source)
        if name.split(".")[0] in ("fcntl", "filelock") or name.startswith("hashlib.")
    ]
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="hashlib"), attr=attribute) if attribute != "blake2b":
                complaints.append(f"{node.lineno}: hashlib.{attribute}; checksums are made in {FILES}")
    return complaints


def one_place_asks_for_a_device(source: Source) -> list[str]:
    """Which device there is, torch is asked in devices.py, and vLLM in rollout/internals."""
    path = str(source.path)
    complaints = []
    for node in ast.walk(source.tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "accelerator" as attribute) if path != DEVICES:
                complaints.append(f"{node.lineno}: torch.{attribute}; {DEVICES} decides")
    if not path.startswith(INTERNALS):
        names = [(line, name) for line, name in imports(source) if name.startswith("vllm.platforms")]
        complaints += [f"{line}: imports {name}; {INTERNALS}platform.py asks vLLM" for line, name in names]
    return complaints


def templates_hold_the_html(source: Source) -> list[str]:
    """Templates escape every value; a string in Python would not."""
    return [
        f"{node.lineno}: HTML in Python; put it in report/templates"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant) and re.search(r"</(b|p|pre|div|table|t[rdh]|h\d|section)>", str(node.value))
    ]


def docstrings_have_a_subject(source: Source) -> list[str]:
    """Looks at every string that stands alone: docstrings of modules, classes, functions and fields."""
    return [
        f"{node.lineno}: a docstring begins with 'Of '; begin with its subject or with a verb"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).startswith("Of ")
    ]


RULES: tuple[Rule, ...] = (
    imports_point_down,
    heavy_libraries_have_one_owner,
    nothing_is_called_utils,
    functions_are_short,
    only_cli_prints,
    only_cli_reads_the_environment,
    nothing_runs_foreign_code,
    modules_say_what_they_are_for,
    nothing_outside_of_the_wheel_is_imported,
    files_are_short,
    one_atomic_write,
    one_checksum_and_one_lock,
    one_place_asks_for_a_device,
    templates_hold_the_html,
    docstrings_have_a_subject,
)
RULES_EVERYWHERE: tuple[Rule, ...] = (
    functions_are_short,
    nothing_is_called_utils,
    modules_say_what_they_are_for,
    docstrings_have_a_subject,
)


def snippet(path: str, text: str) -> Source:
    return Source(path=PurePosixPath(path), tree=ast.parse(text), num_lines=len(text.splitlines()))


def read(file: Path, *, base: Path) -> Source:
    return snippet(file.relative_to(base).as_posix(), file.read_text(encoding="utf-8"))


@cache
def package() -> tuple[Source, ...]:
    sources = tuple(read(file, base=PACKAGE) for file in sorted(PACKAGE.rglob("*.py")))
    assert len(sources) > 10, "the package was not found, so nothing would be checked"
    return sources


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_rule(rule: Rule) -> None:
    assert [f"{source.path}:{complaint}" for source in package() for complaint in rule(source)] == []


@pytest.mark.parametrize("rule", RULES_EVERYWHERE, ids=lambda rule: rule.__name__)
def test_other_code_keeps_rule(rule: Rule) -> None:
    files = [
        file
        for folder in ("benchmarks", "tests", "scripts", "examples")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]
    sources = [read(file, base=ROOT) for file in files]
    assert [f"{source.path}:{complaint}" for source in sources for complaint in rule(source)] == []


LONG = "def f():\n" + "    x = 1\n" * LONGEST_FUNCTION

BAD = (
    (imports_point_down, "types.py", "from paceline.files import atomic_file"),
    (imports_point_down, "metrics.py", "import paceline.orchestrator.loop"),
    (imports_point_down, "rollout/engine.py", "from ..learner import fsdp"),
    (imports_point_down, "rollout/engine.py", "from paceline.learner.fsdp import FsdpLearner"),
    (imports_point_down, "orchestrator/loop.py", "def f():\n    from paceline import demo"),
    (imports_point_down, "orchestrator/loop.py", "if TYPE_CHECKING:\n    from paceline.plan.answer import Question"),
    (imports_point_down, "evidence/report.py", "from paceline.arena.task import Problem"),
    (imports_point_down, "measure.py", "from paceline.metrics import Sink"),
    (imports_point_down, "arena/task.py", "importlib.import_module('paceline.demo.run')"),
    (imports_point_down, "demo/run.py", "from paceline.cli import main"),
    (imports_point_down, "__init__.py", "from paceline.types import Rollout"),
    (imports_point_down, "stray.py", "x = 1"),
    (heavy_libraries_have_one_owner, "orchestrator/loop.py", "import vllm"),
    (heavy_libraries_have_one_owner, "learner/fsdp.py", "from vllm.config import VllmConfig"),
    (heavy_libraries_have_one_owner, "rollouts.py", "import vllm"),
    (heavy_libraries_have_one_owner, "orchestrator/loop.py", "def f():\n    import ray"),
    (heavy_libraries_have_one_owner, "orchestrator/loop.py", "import_module('ray.actor')"),
    (heavy_libraries_have_one_owner, "plan/page.py", "from matplotlib import pyplot"),
    (heavy_libraries_have_one_owner, "integrations/verl.py", "import trl"),
    (heavy_libraries_have_one_owner, "demo/batch.py", "def f():\n    from trl import GRPOTrainer"),
    (heavy_libraries_have_one_owner, "cli/train.py", "import wandb"),
    (nothing_is_called_utils, "rollout/utils.py", ""),
    (nothing_is_called_utils, "utils/names.py", ""),
    (functions_are_short, "orchestrator/loop.py", LONG),
    (
        functions_are_short,
        "orchestrator/loop.py",
        "class A:\n" + "".join(f"    {line}\n" for line in ("async " + LONG).splitlines()),
    ),
    (only_cli_prints, "orchestrator/loop.py", "print('step')"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "x = os.environ['HOME']"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "x = os.environ.get('HOME')"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "x = os.getenv('HOME')"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "from os import environ"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "os.environ['A'] = 'b'"),
    (only_cli_reads_the_environment, "orchestrator/loop.py", "os.environ.update(A='b')"),
    (only_cli_reads_the_environment, "rollout/engine.py", "x = os.environ['HOME']"),
    (only_cli_reads_the_environment, "cluster/placement.py", "x = os.environ.pop('HOME')"),
    (only_cli_reads_the_environment, "rollout/plugin.py", "x = os.environ.get('HOME')"),
    (only_cli_reads_the_environment, "rollout/hosts.py", "x = os.environ.get('PACELINE')"),
    (nothing_runs_foreign_code, "orchestrator/store.py", "import pickle"),
    (nothing_runs_foreign_code, "cluster/actors.py", "from ray import cloudpickle\nfrom cloudpickle import dumps"),
    (nothing_runs_foreign_code, "orchestrator/store.py", "torch.load('x', weights_only=True)"),
    (nothing_runs_foreign_code, "orchestrator/store.py", "from torch import load"),
    (nothing_runs_foreign_code, "rollout/engine.py", "EngineArgs(trust_remote_code=True)"),
    (nothing_runs_foreign_code, "rollout/engine.py", "EngineArgs(trust_remote_code=config.trust)"),
    (nothing_runs_foreign_code, "rollout/engine.py", "settings = {'trust_remote_code': True}"),
    (modules_say_what_they_are_for, "orchestrator/loop.py", "x = 1\n'too late'"),
    (nothing_outside_of_the_wheel_is_imported, "certify/logp.py", "def f():\n    from benchmarks import v2_runner"),
    (nothing_outside_of_the_wheel_is_imported, "plan/answer.py", "import benchmarks.published.figures"),
    (files_are_short, "plan/answer.py", "x = 1\n" * (LONGEST_FILE + 1)),
    (files_are_short, "orchestrator/loop.py", "x = 1\n" * 201),
    (one_atomic_write, "drafters/rounds.py", "partial.replace(file)"),
    (one_atomic_write, "drafters/rounds.py", "partial.rename(file)"),
    (one_atomic_write, "measure.py", "os.rename(partial, file)"),
    (one_atomic_write, "measure.py", "shutil.move(partial, file)"),
    (one_checksum_and_one_lock, "drafters/saver.py", "hashlib.sha256(content)"),
    (one_checksum_and_one_lock, "arena/policy.py", "from fcntl import flock"),
    (one_checksum_and_one_lock, "arena/policy.py", "from filelock import FileLock"),
    (one_place_asks_for_a_device, "learner/fsdp.py", "gpu = torch.cuda.is_available()"),
    (one_place_asks_for_a_device, "cluster/placement.py", "torch.accelerator.current_accelerator()"),
    (one_place_asks_for_a_device, "rollout/engine.py", "from vllm.platforms import current_platform"),
    (templates_hold_the_html, "plan/page.py", "row = f'<td>{value}</td>'"),
    (docstrings_have_a_subject, "learner/guard.py", 'class A:\n    x: int\n    """Of a step."""'),
    (docstrings_have_a_subject, "learner/guard.py", 'def f():\n    """Of a step."""'),
)

GOOD = (
    (imports_point_down, "cluster/actors.py", "from paceline.rollout.engine import VllmEngine"),
    (imports_point_down, "cluster/actors.py", "from . import proxies\nfrom ..config import Config"),
    (imports_point_down, "demo/run.py", "from paceline.measure import Result\nfrom paceline.arena import policy"),
    (
        imports_point_down,
        "cli/demo.py",
        "from paceline import __version__\nfrom paceline.demo import run\nimport numpy",
    ),
    (heavy_libraries_have_one_owner, "rollout/engine.py", "from vllm import SamplingParams"),
    (heavy_libraries_have_one_owner, "cluster/proxies.py", "import ray\nfrom ray.util import placement_group"),
    (heavy_libraries_have_one_owner, "orchestrator/loop.py", "import rayon"),
    (functions_are_short, "orchestrator/loop.py", LONG.removesuffix("    x = 1\n")),
    (only_cli_prints, "cli/train.py", "print('step')"),
    (only_cli_reads_the_environment, "cli/common.py", "x = os.environ.get('HOME')"),
    (only_cli_reads_the_environment, "rollout/plugin.py", "x = os.environ.get('PACELINE')"),
    (only_cli_reads_the_environment, "rollout/arguments.py", "os.environ['A'] = 'b'\nos.environ.setdefault('A', 'b')"),
    (
        nothing_runs_foreign_code,
        "rollout/engine.py",
        "EngineArgs(trust_remote_code=False)\nsafetensors.torch.load_file('x')",
    ),
)


def twice_named(sources: Iterable[Source]) -> list[str]:
    """Classes that share a name, a leading underscore aside: a reader who searches for one finds the other."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{source.path}:{node.lineno}")
    return [f"{name}: {', '.join(found)}" for name, found in sorted(places.items()) if len(found) > 1]


def cycles(sources: Sequence[Source]) -> list[str]:
    """Modules that import themselves through others, lazily or not: what is left after leaves are taken away."""
    modules = {".".join((*source.package, source.path.stem)).removesuffix(".__init__"): source for source in sources}

    def targets(name: str, source: Source) -> set[str]:
        found = {full if full in modules else full.rpartition(".")[0] for _, full in imports(source)}
        return (found & modules.keys()) - {name}

    graph = {name: targets(name, source) for name, source in modules.items()}
    while leaves := {name for name, needs in graph.items() if not needs}:
        graph = {name: needs - leaves for name, needs in graph.items() if name not in leaves}
    return sorted(graph)


def test_no_class_name_stands_twice() -> None:
    assert twice_named(package()) == []
    planted = [snippet("a.py", "class Batch: ..."), snippet("b/c.py", "def f():\n    class _Batch: ...")]
    assert twice_named(planted) == ["Batch: a.py:1, b/c.py:2"]


def test_modules_do_not_import_in_circles() -> None:
    assert cycles(package()) == []
    planted = {
        "plan/a.py": "def f():\n    from paceline.plan import b",
        "plan/b.py": "from paceline.plan.c import x",
        "plan/c.py": "from paceline.plan.a import f\nfrom paceline.plan.d import y",
        "plan/d.py": "y = 1",
    }
    assert cycles([snippet(*item) for item in planted.items()]) == [
        "paceline.plan.a",
        "paceline.plan.b",
        "paceline.plan.c",
    ]


@pytest.mark.parametrize(("rule", "path", "text"), BAD)
def test_rule_bites(rule: Rule, path: str, text: str) -> None:
    assert len(rule(snippet(path, text))) == 1


@pytest.mark.parametrize(("rule", "path", "text"), GOOD)
def test_rule_lets_pass(rule: Rule, path: str, text: str) -> None:
    assert rule(snippet(path, text)) == []


def test_every_rule_has_a_snippet_that_breaks_it() -> None:
    assert {rule for rule, _, _ in BAD} == set(RULES)


# What a distribution of one name brings under another.
BROUGHT_BY = {
    "accelerate": "trl",
    "huggingface_hub": "transformers",
    "mlflow": "mlflow-skinny",
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "starlette": "vllm",
    "triton": "vllm",
}


def declared() -> set[str]:
    """Distributions that pyproject.toml names, in the dependencies and in the extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    return {re.split(r"[\[<>=!~; ]", line)[0] for line in lines} - {"paceline"}


def test_every_imported_library_is_declared() -> None:
    """Otherwise an installation by range works only where something else happens to bring it."""
    imported = (
        {name.split(".")[0] for source in package() for _, name in imports(source)}
        - {"paceline"}
        - sys.stdlib_module_names
    )
    assert {BROUGHT_BY.get(name, name) for name in imported} - declared() == set()


def test_every_declared_library_has_its_reason() -> None:
    documented = set(
        re.findall(
            r"^\|(?: `\w+` \|)? ([\w-]+) \| `",
            (ROOT / "docs/dependencies.md").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    assert documented == declared()


def test_lock_pins_every_wheel_by_hash_and_names_no_origin() -> None:
    """One line without a hash, or with an index of its own, and the environment is no longer the one that was
    tested."""
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        text = re.sub(r"^#.*\n", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert re.fullmatch(r"([a-z0-9-]+==[\w.+]+ \\\n    --hash=sha256:[0-9a-f]{64}\n)+", text), (
            f"{file.name}: see scripts/lock-cpu.py"
        )


def test_tree_in_the_docs_is_up_to_date() -> None:
    docs = runpy.run_path(str(ROOT / "scripts" / "tree-docs.py"))
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert docs["page"](text) == text, "run: python scripts/tree-docs.py"
