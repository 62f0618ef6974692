"""`paceline doctor`: run all checks in order and report the result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from difflib import get_close_matches
from pathlib import Path

from paceline.config import Config
from paceline.context import CancelledError, Context
from paceline.doctor import engine, machine, weights
from paceline.doctor.finding import Finding, SkippedError, counts, failed
from paceline.doctor.setup import Setup
from paceline.measure import Goal, Result, environment

CheckFunction = Callable[[Setup], Finding]

_LONGEST_MESSAGE = 400
_FEWEST = 12
"""Checks that must run, not be skipped, for a whole examination to count."""


_REPORT = "attach the page to a bug report"
CHECKS: dict[str, dict[CheckFunction, str]] = {
    "machine": {
        machine.packages: "install Paceline again with its dependencies: pip install -e '.[vllm,report]', or "
        "scripts/install-cpu.sh; unset VLLM_PLUGINS",
        machine.devices: "install builds of torch and vLLM for the same device, and its driver; or set "
        "cluster.device=cpu",
        machine.compiler: "install a C++ compiler and Python's headers: apt install g++ python3-dev",
        machine.ray: "run `ray status`; lower rollout.num_engines or learner.world_size, or set cluster.address",
    },
    "config": {
        engine.policy: "set policy.model to a Hugging Face checkpoint directory with safetensors; copy a damaged one "
        "again",
        engine.prompts: "correct [data] or [rollout] (group_size, max_tokens, engine.max_model_len)",
        engine.drafter: "use the drafter of this policy or train one (paceline draft train); measure costs with "
        "paceline tune",
    },
    "memory": {
        machine.gpu_memory_free: "stop other processes on the GPU, or lower rollout.engine.gpu_memory_utilization",
        machine.host_memory: "stop other processes, lower rollout.engine.kv_cache_gb, or use a machine with more "
        "memory",
        machine.shared_memory: "enlarge /dev/shm: docker run --shm-size=8g, in Kubernetes an emptyDir of medium Memory "
        "at /dev/shm",
    },
    "engine": {
        engine.start: f"run again with VLLM_LOGGING_LEVEL=INFO and read vLLM's message above; {_REPORT}",
        engine.generate: f"compare with `paceline certify --drafter KIND`; {_REPORT}",
        engine.sampler: "do not train with speculation here; unset VLLM_PLUGINS or add paceline_sampler to it, then "
        "run `paceline certify`",
        engine.accepted_length: "the drafter belongs to another policy, or the policy has moved: use its own or "
        "`paceline draft train`",
    },
    "learner and weights": {
        weights.log_probabilities: "run `paceline certify logp` to find the precision that differs",
        weights.push: "read the refusal, which begins with the tensor's name; lower learner.microbatch_tokens if "
        f"memory ran out; {_REPORT}",
        weights.broadcast: "allow connections to 127.0.0.1; on GPUs run again with NCCL_DEBUG=INFO, try "
        f"NCCL_P2P_DISABLE=1, and in containers --ipc=host; {_REPORT}",
    },
}
"""Checks by part, in order, each with the advice for its failure. A check's docstring is its title."""


def examine(config: Config, context: Context, *, only: Sequence[str] = ()) -> tuple[list[Finding], Result]:
    """Run all checks, or those named in `only`."""
    chosen = [
        (part, check, advice)
        for part, checks in CHECKS.items()
        for check, advice in checks.items()
        if not only or name_of(check) in _known(only)
    ]
    began_s = time.monotonic()
    findings = []
    with Setup(config, context) as setup:
        for number, (part, check, advice) in enumerate(chosen, start=1):
            context.progress(f"{number}/{len(chosen)} {name_of(check)}: {_title(check)}")
            findings.append(_run(check, setup, part=part, advice=advice))
    return findings, _result(findings, config, time.monotonic() - began_s, whole=not only)


def name_of(check: CheckFunction) -> str:
    return check.__name__.replace("_", "-")


def _title(check: CheckFunction) -> str:
    return " ".join((check.__doc__ or "").split()).rstrip(".")


def _known(names: Sequence[str]) -> Sequence[str]:
    """Return `names`, or refuse one that is not a check."""
    known = [name_of(check) for checks in CHECKS.values() for check in checks]
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"--only: got {name!r}; must be of {', '.join(known)}{hint}")
    return names


def _run(check: CheckFunction, setup: Setup, *, part: str, advice: str) -> Finding:
    """Run one check. An exception is its failure."""
    trace = ""
    began_s = time.monotonic()
    try:
        found = check(setup)
    except CancelledError:
        raise
    except SkippedError as reason:
        found = Finding(status="skipped", evidence=str(reason))
    except Exception as error:  # noqa: BLE001  finding it is the purpose of the check
        trace = _without_home(traceback.format_exc())
        found = failed(f"{type(error).__name__}: {error}")
    evidence = _without_home(found.evidence)
    return replace(
        found,
        name=name_of(check),
        title=_title(check),
        part=part,
        evidence=evidence if len(evidence) <= _LONGEST_MESSAGE else f"{evidence[:_LONGEST_MESSAGE]}…",
        advice=(found.advice or advice) if found.status == "failed" else "",
        seconds=time.monotonic() - began_s,
        traceback=trace,
    )


def _without_home(text: str) -> str:
    return text.replace(str(Path.home()), "~")


def _result(findings: Sequence[Finding], config: Config, seconds: float, *, whole: bool) -> Result:
    found = counts(findings)
    goals: dict[str, Goal] = {"failed": ("<=", 0.0)}
    if whole:
        goals["checks"] = (">=", float(_FEWEST))
    figures = {
        "checks": float(found["passed"] + found["failed"]),
        "failed": float(found["failed"]),
        "skipped": float(found["skipped"]),
        "seconds": seconds,
    }
    return Result(
        name="doctor",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals=goals,
        environment=environment(seeds=[config.run.seed], config=config.model_dump(mode="json")),
        details={
            "failed": [finding.name for finding in findings if finding.status == "failed"],
            "checks": [{key: value for key, value in asdict(row).items() if value not in ("", {})} for row in findings],
        },
    )
