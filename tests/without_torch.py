"""Skip tests that import a library that is not installed, such as PyTorch (`.ci/run pythons`); a pytest plugin."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

import pytest

# The extras, and their dependencies that tests import.
HEAVY = (
    "torch",
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "ray",
    "vllm",
    "speculators",
    "matplotlib",
    "prometheus_client",
    "yaml",
)


class _Absent(MetaPathFinder):
    """Asked last, and so only for what is not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in HEAVY:
            raise pytest.skip.Exception(f"needs {fullname}", allow_module_level=True)


sys.meta_path.append(_Absent())
