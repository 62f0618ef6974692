"""A pytest plugin for environments without PyTorch, vLLM and Ray: skip the tests that import them (`.ci/run pythons`)."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

import pytest

HEAVY = ("torch", "transformers", "tokenizers", "ray", "vllm", "speculators", "matplotlib")


class _Absent(MetaPathFinder):
    """Asked last, and so only for what is not installed."""

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        if fullname in HEAVY:
            raise pytest.skip.Exception(f"needs {fullname}", allow_module_level=True)


sys.meta_path.append(_Absent())
