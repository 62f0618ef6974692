"""A Python with everything that is installed here but Paceline: the machine of somebody who does not have it."""

from __future__ import annotations

import os
import sysconfig
import venv
from pathlib import Path


def make_foreign_python(directory: Path) -> Path:
    """Make the environment in `directory`; returns its Python."""
    venv.create(directory)
    target = next(directory.glob("lib/python*/site-packages"))
    for folder in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for entry in Path(folder).iterdir():
            if "paceline" not in entry.name.lower() and not (target / entry.name).exists():
                (target / entry.name).symlink_to(entry)
    return directory / "bin" / "python"


def foreign_environment() -> dict[str, str]:
    """Ours without what leads to Paceline, and without what our engines have set for vLLM."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_", "VIRTUAL_ENV"))
    }
    return kept | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
