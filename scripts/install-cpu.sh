#!/usr/bin/env bash
# Make an environment with vLLM's CPU build and Paceline in it, from the hash-checked lock.
#
#   scripts/install-cpu.sh [arguments for pip install]
#
# PYTHON chooses the interpreter (default python3.11), VENV the directory (default .venv). Further arguments go to pip, for instance
# --extra-index-url with PyTorch's index of CPU wheels. Running it again brings an existing environment to the lock.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1

die() {
  printf 'install-cpu: %s\n' "$@" >&2
  exit 1
}

command -v "$PYTHON" >/dev/null || die "$PYTHON is not there. Install Python 3.11, or name it: PYTHON=/path/to/python3.11 $0"
# The lock names the wheels of exactly this platform; any other would end in a hash mismatch that explains nothing.
"$PYTHON" - <<'PY' || die "the lock is for CPython 3.11 on x86-64 Linux. PYTHON=... chooses another interpreter; for another platform see docs/dependencies.md"
import platform, sys
found = (platform.python_implementation(), sys.version_info[:2], sys.platform, platform.machine())
if found != ("CPython", (3, 11), "linux", "x86_64"):
    sys.exit(f"install-cpu: found {found}")
PY
# torch.compile and Triton compile against Python's headers at run time; without these, an engine fails long after the installation.
command -v g++ >/dev/null || die "g++ is not there, and vLLM compiles kernels with it. Install it, for instance: apt-get install g++"
"$PYTHON" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
  die "Python.h is not there, and vLLM compiles against it. Install Python's headers, for instance: apt-get install python3.11-dev"

"$PYTHON" -m venv "$VENV" || die "the environment $VENV could not be made. Debian and Ubuntu need: apt-get install python3.11-venv"
python=$VENV/bin/python
"$python" -m pip install -qq --require-hashes --no-deps "$@" -r requirements/pip.txt
echo "Installing $(grep -c '==' requirements/cpu.txt) pinned wheels (about 1 GB to download, 4 GB on disk) ..."
"$python" -m pip install -qq --require-hashes --no-deps --only-binary=:all: "$@" -r requirements/cpu.txt || die \
  "pip could not install the lock; its reason stands above." \
  "If it is torch==2.13.0+cpu that was not found: pip needs PyTorch's index of CPU wheels, as PyTorch's install page says. Either" \
  "configure it in pip or run: $0 --extra-index-url <that index>"
"$python" -m pip install -qq --no-deps --no-build-isolation --editable .
# shellcheck disable=SC2016  the text is Python
"$python" -c 'import ray, torch, vllm; print(f"vLLM {vllm.__version__}, PyTorch {torch.__version__}, Ray {ray.__version__}: imported")' ||
  die "the environment is complete but does not import; its reason stands above. Remove $VENV and run this again"

cat <<EOF
Paceline is installed in $VENV. Next:
  source $VENV/bin/activate
  paceline demo                 one short run, with its report
  paceline --help
EOF
