"""Renew the hashes in requirements/*.txt: edit, add or delete a `name==version` line there, then run this with Python
3.11.

    .venv/bin/python scripts/lock-cpu.py

pip resolves each pin to the one wheel that it would install on this machine and reports its SHA-256. No dependency is
added: `pip check` names what a new version asks for (docs/dependencies.md lists what is left out on purpose). Only
names, versions and hashes are written, never where a wheel came from.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = """\
# Wheels for CPython 3.11 on x86-64 Linux (glibc 2.28 or newer), pinned by hash: scripts/lock-cpu.py makes this file.
# Install with --no-deps, since some packages ask for more than is used here: docs/dependencies.md.
"""
PIP = ("pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "-qq")


def lock(path: Path) -> int:
    """Rewrite one file with the hashes of its pins; returns how many there are."""
    pins = re.findall(r"^[A-Za-z0-9._-]+==[^\s\\]+", path.read_text(), flags=re.MULTILINE)
    with tempfile.TemporaryDirectory() as directory:
        wanted, report = Path(directory, "pins.txt"), Path(directory, "report.json")
        wanted.write_text("\n".join(pins))
        subprocess.run([sys.executable, "-m", *PIP, "--report", str(report), "-r", str(wanted)], check=True)  # noqa: S603  our own arguments
        found = json.loads(report.read_text())["install"]
    assert len(found) == len(pins), f"{path}: pip found {len(found)} of {len(pins)} pins; is one listed twice?"
    entries = []
    for item in found:
        name = re.sub(r"[-_.]+", "-", item["metadata"]["name"]).lower()
        sha256 = item["download_info"]["archive_info"]["hashes"]["sha256"]
        entries.append(f"{name}=={item['metadata']['version']} \\\n    --hash=sha256:{sha256}\n")
    path.write_text(HEADER + "".join(sorted(entries)))
    return len(entries)


if __name__ == "__main__":
    for file in sorted(Path(__file__).resolve().parents[1].joinpath("requirements").glob("*.txt")):
        sys.stderr.write(f"{file.name}: {lock(file)} wheels\n")
