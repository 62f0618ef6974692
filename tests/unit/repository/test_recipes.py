"""Recipes for other trainers: their keys are those that were found in the releases, and the script finds wrong ones."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from paceline.rollout.internals.version import OLDEST_HOST, is_known
from paceline.rollout.speculation import SCHEDULER

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "check-recipes.py"))
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
FOUND: dict[str, dict[str, Any]] = json.loads((ROOT / "docs" / "recipes" / "keys.json").read_text(encoding="utf-8"))


def test_every_host_has_a_page_and_every_page_is_in_the_navigation() -> None:
    assert {release.split()[0] for release in FOUND} == SCRIPT["HOSTS"].keys()
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert len(PAGES) == len(SCRIPT["HOSTS"])
    assert all(f"recipes/{page.name}" in navigation for page in PAGES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_keys_of_a_page_are_those_that_were_found(page: Path) -> None:
    """A key that the release does not have is ignored there, or ends the run."""
    text = page.read_text(encoding="utf-8")
    wanted: dict[str, set[str]] = {}
    for host, release, names in SCRIPT["blocks"](text):
        wanted.setdefault(f"{host} {release}", set()).update(names)
    assert wanted, "nothing on this page is checked"
    prose = re.sub("<!--.*?-->", "", text)
    for release, names in wanted.items():
        assert names == FOUND[release]["keys"].keys(), "run: python scripts/check-recipes.py SOURCES --record"
        assert release in prose and f"wants vLLM {FOUND[release]['vllm']}" in " ".join(prose.split())
        assert is_known(FOUND[release]["vllm"], OLDEST_HOST), "Paceline does nothing there"
    assert "any GPU" in text.rpartition("Not run: ")[2], "what has not run must be said"
    assert text.count("paceline.rollout.") == text.count(SCHEDULER)


VLLM = {
    "vllm/engine/arg_utils.py": "class EngineArgs:\n    scheduler_cls: str\n    speculative_config: dict",
    "vllm/config/speculative.py": (
        "class Base:\n    method: str\nclass SpeculativeConfig(Base):\n    draft_load_config: LoadConfig"
    ),
    "vllm/config/load.py": "class LoadConfig:\n    load_format: str",
    "vllm/envs.py": "if TYPE_CHECKING:\n    VLLM_PORT: int = 1",
}
METADATA = "Requires-Dist: vllm==0.1.0; extra == 'vllm'"
SOURCES = {
    "verl": {
        "verl-1.dist-info/METADATA": METADATA,
        "verl/trainer/config/_generated_ppo_trainer.yaml": (
            "actor_rollout_ref: {rollout: {engine_kwargs: {vllm: {}}}}\nray_kwargs: {ray_init: {runtime_env: {}}}"
        ),
    },
    "NeMo-RL": {
        "pyproject.toml": 'vllm = ["vllm==0.1.0"]',
        "examples/configs/grpo_math_1B.yaml": "policy: {generation: {vllm_kwargs: {}}}",
        "nemo_rl/models/generation/vllm/config.py": (
            "class Args(TypedDict):\n    env_vars: NotRequired[dict[str, str]]\n"
            "class VllmConfig(GenerationConfig):\n    vllm_cfg: Args"
        ),
    },
    "SkyRL": {
        "skyrl-1.dist-info/METADATA": METADATA,
        "skyrl/train/config/config.py": (
            "class Inference(BaseConfig):\n    engine_init_kwargs: Dict[str, Any] = field(default_factory=dict)\n"
            "class Generator(BaseConfig):\n    inference_engine: Optional[Inference] = None\n"
            "class SkyRLTrainConfig(BaseConfig):\n    generator: Generator"
        ),
    },
    "prime-rl": {
        "pyproject.toml": 'url = "https://host/vllm-0.1.0+cu129.whl"',
        "packages/prime-rl-configs/src/prime_rl/configs/rl.py": (
            "class RLConfig(BaseConfig):\n    inference: InferenceConfig | None = None"
        ),
        "packages/prime-rl-configs/src/prime_rl/configs/inference.py": (
            "class InferenceConfig(BaseConfig):\n    vllm_extra: dict[str, Any] = {}\n    env_vars: EnvVars = {}"
        ),
    },
    "OpenRLHF": {
        "openrlhf-1.dist-info/METADATA": METADATA,
        "openrlhf-1.data/purelib/openrlhf/cli/train_ppo_ray.py": (
            'parser.add_argument("--vllm.num_engines", help="--vllm.unknown")'
        ),
    },
}
"""As much of every host as its keys need. Importing any of the files would fail."""
RIGHT_AND_WRONG = [
    ("verl", "bash", "python -m verl.x +actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls=x", "-m verl.x"),
    ("verl", "bash", "'actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={method: x, how: y}'", ".how"),
    ("verl", "bash", "actor_rollout_ref.rollout.engine_kwarg.vllm.scheduler_cls=x", ".scheduler_cls"),
    ("verl", "bash", "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_PORT=1", None),
    ("verl", "bash", "+ray_kwargs.ray_init.runtime_env.env.VLLM_PORT=1", ".env.VLLM_PORT"),
    ("NeMo-RL", "yaml", "policy: {generation: {vllm_cfg: {env_vars: {PACELINE: auto}}}}", None),
    ("NeMo-RL", "yaml", "policy: {generation: {vllm_cfg: {env_vars: {VLLM_PROT: 1}}}}", ".VLLM_PROT"),
    ("NeMo-RL", "yaml", "policy: {generation: {vllm_kwargs: {scheduler: x}}}", ".scheduler"),
    ("SkyRL", "bash", "generator.inference_engine.engine_init_kwargs.scheduler_cls=x", None),
    (
        "SkyRL",
        "bash",
        "'generator.inference_engine.engine_init_kwargs.speculative_config={draft_load_config: {load_format: x}}'",
        None,
    ),
    ("SkyRL", "bash", "generator.inference_engine.engine_kwargs.scheduler_cls=x", ".engine_kwargs.scheduler_cls"),
    ("prime-rl", "toml", '[inference.vllm_extra]\nscheduler_cls = "x"', None),
    ("prime-rl", "toml", '[inference.vllm]\nscheduler_cls = "x"', "inference.vllm.scheduler_cls"),
    ("OpenRLHF", "bash", """ray --runtime-env-json='{"env_vars": {"PACELINE": "x"}}' -- --vllm.num_engines 4""", None),
    ("OpenRLHF", "bash", "--vllm.unknown 4", "--vllm.unknown"),
]


@pytest.mark.parametrize(("host", "language", "body", "gone"), RIGHT_AND_WRONG)
def test_script_names_keys_that_are_not_there(
    host: str, language: str, body: str, gone: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory, files in {f"{host}-1": SOURCES[host], "vllm-0.1.0": VLLM}.items():
        for name, text in files.items():
            file = tmp_path / "sources" / directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    pages = tmp_path / "pages"
    pages.mkdir()
    (pages / "page.md").write_text(f"<!-- keys: {host} 1 -->\n```{language}\n{body}\n```\n")
    code = SCRIPT["main"]([str(tmp_path / "sources"), "--record"], pages)
    out = capsys.readouterr().out
    assert (code, out.count("MISSING")) == ((0, 0) if gone is None else (1, 1))
    assert gone is None or f"{gone}: MISSING" in out
    assert (pages / "keys.json").exists() == (gone is None), "a key that is not there must not be recorded"


def test_nothing_found_is_no_success(tmp_path: Path) -> None:
    """Pages whose marks were misspelled would otherwise pass unread."""
    (tmp_path / "page.md").write_text("<!-- key: verl 1 -->\n```bash\na.b=1\n```\n")
    assert SCRIPT["main"]([str(tmp_path)], tmp_path) == 1
