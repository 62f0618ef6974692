"""Plugins in other people's engines: they never raise, keep to the vLLM that they know, and say what they did."""

from __future__ import annotations

import ast
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from paceline.rollout import hosts, plugin
from paceline.rollout.internals import drafter_model, engine_arguments, platform, sampler_fix
from paceline.rollout.speculation import SCHEDULER


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[logging.LogRecord]]:
    """What the plugins log in a process that they have not run in yet."""
    handler = Lines()
    level = plugin.logger.level
    plugin.logger.addHandler(handler)
    plugin.logger.setLevel(logging.INFO)
    monkeypatch.setattr(plugin, "_said", set())
    monkeypatch.delenv("PACELINE", raising=False)
    yield handler.records
    plugin.logger.removeHandler(handler)
    plugin.logger.setLevel(level)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM that we know, and that has nothing but a version."""
    fake: Any = SimpleNamespace(__version__="0.32.0")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    return fake


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The steps that were taken, in place of what they do."""
    done: list[str] = []
    for name in ("_initialize_amx", "_register_backend", "_watch_arguments", "_mend_sampler"):
        monkeypatch.setattr(plugin, name, step(name, done))
    return done


def step(name: str, done: list[str], error: Exception | None = None) -> Callable[[], str]:
    def take() -> str:
        done.append(name)
        if error is not None:
            raise error
        return f"{name} done"

    take.__name__ = name
    return take


def test_importing_the_plugin_needs_the_standard_library_only() -> None:
    """vLLM reports a plugin that cannot be imported in every one of its processes."""
    tree = ast.parse(Path(plugin.__file__).read_text())
    modules = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else name.name
        for node in tree.body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert "logging" in modules
    assert {name.split(".")[0] for name in modules} <= sys.stdlib_module_names


def test_known_vllm_gets_every_step_and_one_line(vllm, taken: list[str], lines: list[logging.LogRecord]) -> None:
    for _ in range(2):
        plugin.register()
    assert taken == ["_initialize_amx", "_register_backend", "_watch_arguments"] * 2
    (record,) = lines
    assert record.levelno == logging.INFO
    assert "plugin paceline: _initialize_amx done; _register_backend done" in record.getMessage()
    plugin.mend()
    assert taken[-1] == "_mend_sampler" and len(lines) == 2


@pytest.mark.parametrize("version", ["0.23.0", "0.33.0", "0.1.dev1+g123", "dev"])
@pytest.mark.parametrize("act", [plugin.register, plugin.mend])
def test_other_vllm_is_left_alone(
    act: Callable[[], None], version: str, vllm, taken: list[str], lines: list[logging.LogRecord]
) -> None:
    """Installing Paceline must not end an engine of a vLLM whose private parts are elsewhere."""
    vllm.__version__ = version
    act()
    act()
    assert taken == []
    (record,) = lines
    assert f"knows vLLM 0.24 to 0.32, not {version}" in record.getMessage()
    assert record.levelno == logging.INFO


def test_who_sets_the_variable_is_warned_that_nothing_is_done(
    vllm, taken: list[str], lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm.__version__ = "0.23.0"
    monkeypatch.setenv("PACELINE", "auto")
    plugin.register()
    assert [record.levelno for record in lines] == [logging.WARNING]


def test_older_vllm_gets_no_weight_wire(vllm, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its transfer factory is another; that must cost neither the engine nor what hosts get."""
    vllm.__version__ = "0.24.0"
    monkeypatch.setattr(plugin, "_initialize_amx", lambda: "no AMX")
    plugin.register()
    (record,) = lines
    assert record.levelno == logging.INFO
    assert "no weight-transfer backend" in record.getMessage() and "PACELINE is not set" in record.getMessage()


@pytest.mark.parametrize("broken", [None, SimpleNamespace()])
def test_vllm_without_a_version_is_left_alone(
    broken: Any, taken: list[str], lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import that fails, and a module without `__version__`."""
    monkeypatch.setitem(sys.modules, "vllm", broken)
    plugin.register()
    plugin.mend()
    assert taken == [] and len(lines) == 2


@pytest.mark.parametrize("error", [AttributeError("gone"), ImportError("gone"), RuntimeError("gone")])
def test_step_that_fails_costs_itself_only(
    error: Exception, vllm, taken: list[str], lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM does not catch what a plugin raises: the engine would end."""
    monkeypatch.setattr(plugin, "_register_backend", step("_register_backend", taken, error))
    monkeypatch.setattr(plugin, "_mend_sampler", step("_mend_sampler", taken, error))
    plugin.register()
    plugin.mend()
    assert taken == ["_initialize_amx", "_register_backend", "_watch_arguments", "_mend_sampler"]
    assert [record.levelno for record in lines] == [logging.WARNING] * 2
    assert "register backend failed" in lines[0].getMessage() and "gone" in lines[0].getMessage()


class Arguments:
    """As vLLM's EngineArgs: makes a config of its attributes, and refuses some."""

    refuses: tuple[str, ...] = ()

    def __init__(self, **given: Any) -> None:
        self.scheduler_cls = None
        vars(self).update(given)

    def create_engine_config(self, usage: str = "none") -> dict[str, Any]:
        config = {**vars(self), "usage": usage}
        self.model = "made into a path"
        for name in self.refuses:
            if config.get(name):
                raise ValueError(f"{name} is refused")
        return config


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch) -> type[Arguments]:
    """Stands where vLLM's EngineArgs is looked for."""

    class Fake(Arguments):
        create_engine_config = Arguments.create_engine_config

    module: Any = ModuleType(engine_arguments.MODULE)
    module.EngineArgs = Fake
    monkeypatch.setitem(sys.modules, engine_arguments.MODULE, module)
    return Fake


def test_arguments_are_filled_in_before_the_config_is_made(arguments, lines: list[logging.LogRecord]) -> None:
    seen: list[Any] = []

    def filler(given: Any) -> dict[str, Any]:
        seen.append(given.model)
        return {"scheduler_cls": "ours"}

    for _ in range(2):  # plugins may be loaded twice
        assert engine_arguments.fill_before_use(filler)
    assert arguments(model="policy").create_engine_config(usage="a test") == {
        "model": "policy",
        "scheduler_cls": "ours",
        "usage": "a test",
    }
    assert seen == ["policy"] and lines == []


def test_engine_starts_without_what_vllm_refuses(arguments, lines: list[logging.LogRecord]) -> None:
    """A drafter for which this vLLM has no place must not cost the host its engine."""
    arguments.refuses = ("speculative_config",)
    engine_arguments.fill_before_use(lambda given: {"scheduler_cls": "ours", "speculative_config": {"method": "x"}})
    config = arguments(model="policy", speculative_config=None).create_engine_config()
    assert config == {"model": "policy", "scheduler_cls": None, "speculative_config": None, "usage": "none"}
    (record,) = lines
    assert record.levelno == logging.WARNING and "speculative_config is refused" in record.getMessage()


def test_error_of_the_host_is_raised_as_it_is(arguments, lines: list[logging.LogRecord]) -> None:
    """Blamed on us, it would be searched for in the wrong place."""
    arguments.refuses = ("theirs",)
    engine_arguments.fill_before_use(lambda given: {"scheduler_cls": "ours"})
    with pytest.raises(ValueError, match="theirs is refused"):
        arguments(theirs=1).create_engine_config()
    assert lines == []


def test_filler_that_fails_costs_nothing(arguments, lines: list[logging.LogRecord]) -> None:
    def filler(given: Any) -> dict[str, Any]:
        raise KeyError("a bug of ours")

    engine_arguments.fill_before_use(filler)
    assert arguments().create_engine_config() == {"scheduler_cls": None, "usage": "none"}
    assert len(lines) == 1


def test_workers_need_not_import_vllms_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, engine_arguments.MODULE, raising=False)
    assert not engine_arguments.fill_before_use(lambda given: {})
    assert engine_arguments.MODULE not in sys.modules


def test_arguments_are_watched_only_where_the_variable_is_set(
    arguments, lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Off unless it is there: an engine of somebody who only installed us is vLLM's own."""
    stock = arguments.create_engine_config
    assert plugin._watch_arguments() == "PACELINE is not set"
    assert arguments.create_engine_config is stock
    monkeypatch.setenv("PACELINE", "auto")
    plugin._watch_arguments()
    assert arguments.create_engine_config is not stock
    monkeypatch.delenv("PACELINE")  # as rollout/arguments.py does for our own engines
    assert arguments().create_engine_config()["scheduler_cls"] is None
    assert lines == []


@dataclass
class HostArguments:
    model: str = "policy"
    scheduler_cls: str | None = None
    speculative_config: dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)


@pytest.mark.usefixtures("vllm")
def test_variable_is_followed_and_said_once(
    lines: list[logging.LogRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a CPU whose sampler was not mended, speculation would sample from a wrong distribution."""
    file = tmp_path / "speculation.toml"
    file.write_text('[speculation.drafter]\nkind = "ngram"\n')
    monkeypatch.setenv("PACELINE", str(file))
    monkeypatch.setattr(platform, "on_cpu", lambda: True)
    monkeypatch.setattr(drafter_model, "loads_apart", lambda: True)
    monkeypatch.setattr(sampler_fix, "needs_mending", lambda: False)
    for _ in range(2):
        assert plugin._fill(HostArguments())["scheduler_cls"] == SCHEDULER
    monkeypatch.setattr(sampler_fix, "needs_mending", lambda: True)
    assert plugin._fill(HostArguments()) == {}
    assert [record.levelno for record in lines] == [logging.INFO, logging.WARNING]
    assert f"PACELINE={file} fills in speculative_config, scheduler_cls, additional_config" in lines[0].getMessage()


@pytest.mark.parametrize(("version", "known"), [("0.29.1", False), ("0.30.0", True)])
def test_older_vllm_is_not_asked_for_what_it_does_not_know(
    version: str, known: bool, vllm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM refuses a speculative_config with a name that it does not have."""
    asked: dict[str, Any] = {}

    def fill(*_: Any, **told: Any) -> hosts.Filling:
        asked.update(told)
        return hosts.Filling(arguments={}, reasons=())

    vllm.__version__ = version
    monkeypatch.setenv("PACELINE", "auto")
    monkeypatch.setattr(hosts, "fill", fill)
    monkeypatch.setattr(platform, "on_cpu", lambda: True)
    monkeypatch.setattr(drafter_model, "loads_apart", lambda: True)
    monkeypatch.setattr(sampler_fix, "needs_mending", lambda: False)
    plugin._fill(HostArguments())
    assert asked["last_block_stays"] is known
