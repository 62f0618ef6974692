"""The environment of a bench's TRL processes: TRL in a directory of its own, and variables as its users set them.

TRL is installed without its dependencies, which vLLM and Paceline bring: so both sides of a comparison run the same
vLLM, PyTorch and transformers, and nothing is added to the environment that Paceline is in.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.arena.policy import build_once
from paceline.context import Context
from paceline.files import atomic_directory, sha256, write_checksums
from paceline.types import PacelineError

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements" / "trl.txt"
"""Version and checksum of TRL."""


def trl_site(context: Context, requirements: Path = REQUIREMENTS) -> Path:
    """Return the directory that holds TRL; downloads it first if it is absent or damaged."""
    directory = context.cache_root / "hosts" / f"trl-{sha256(requirements)[:12]}"

    def write(directory: Path) -> None:
        context.progress(f"installing TRL into {directory}")
        with atomic_directory(directory) as partial:
            _install(requirements, partial)
            write_checksums(partial)

    return build_once(directory, write, name="TRL", context=context)


def _install(requirements: Path, target: Path) -> None:
    options = ("--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:", "--no-compile")
    command = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), "-r", str(requirements)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603  a file of ours
    if done.returncode:
        raise PacelineError(f"TRL cannot be installed: {done.stderr.strip()[-1000:]}\nIt was tried with: {command}")


def host_environment(
    environ: Mapping[str, str], site: Path, *, kv_cache_gb: int, speculation: Path | None = None
) -> dict[str, str]:
    """Return the variables of a process with TRL and one engine, which speculates as the file says.

    `kv_cache_gb` and what begins with VLLM_CPU are for the CPU, where vLLM would take a share of all memory and bind
    its threads to cores.
    """
    kept = {name: value for name, value in environ.items() if name != "PACELINE"}
    path = os.pathsep.join([str(site), str(ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    own = {
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gb),
        "VLLM_USE_AOT_COMPILE": "0",  # as our engines: what was compiled ahead of time cannot be read back on the CPU
    }
    return kept | own | ({} if speculation is None else {"PACELINE": str(speculation)})
