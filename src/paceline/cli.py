"""The `paceline` command. Parses first and imports the heavy libraries later, so that --help answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paceline import __version__
from paceline.types import PacelineError

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.evidence.measure import Result

_EPILOG = """start here:
  paceline demo                                    build the small arena policy, train it, write a report (about 10 minutes)
  paceline train configs/arena.toml run.steps=10   train as a config says; any setting can be overridden
  paceline report runs/arena                       turn a run into one HTML page
"""

BENCHES = {
    "control": "cost of the control plane per rollout, with 16 to 1,024 simulated engines (about 1 minute)",
    "learning": "gain in held-out accuracy by RL on the arena, three seeds (about 17 minutes)",
    "overhead": "tokens/s through our engine against bare vllm.LLM (about 3 minutes)",
    "sync": "weight transfer against a plain memory copy; fingerprints; refusal of bad pushes (about 2 minutes)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    _quiet_environment()
    try:
        return options.command(options)
    except (ValueError, PacelineError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("paceline: interrupted; all processes of the run have ended", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="paceline",
        description="Fast rollouts for RL post-training, on stock vLLM, Ray and PyTorch.",
        epilog=_EPILOG,
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a policy as a config says",
        description="Train a policy: engines sample, the learner updates, new weights are pushed to every engine.\n"
        "Settings are in the TOML file; each can be overridden as section.key=value. docs/config.md explains them all.",
        epilog="example:\n  paceline train configs/arena.toml run.steps=10 rollout.num_engines=1 run.lag=1",
        formatter_class=formatter,
    )
    train.add_argument("config", type=Path, help="TOML file, e.g. configs/arena.toml")
    train.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace those of the file")
    train.set_defaults(command=_train)

    demo = commands.add_parser(
        "demo",
        help="build the arena policy, train it, write the report",
        description="From an installed package to an RL-trained policy and its report, on two CPU cores in under 15 minutes.",
    )
    demo.add_argument("overrides", nargs="*", metavar="a.b=value", help="settings that replace the demo's")
    demo.set_defaults(command=_demo)

    report = commands.add_parser(
        "report",
        help="turn a run into one HTML page",
        description="Read RUN/metrics.jsonl, write RUN/report.html. Works on a run still going.",
    )
    report.add_argument("run", type=Path, help="run directory, e.g. runs/arena")
    report.set_defaults(command=_report)

    arena = commands.add_parser("arena", help="the built-in small workload").add_subparsers(required=True, metavar="ACTION")
    build = arena.add_parser(
        "build",
        help="train and cache an arena policy",
        description="Train an arena policy from scratch and cache it. Built once: it is found again while its recipe is the same.\n"
        "tiny: for tests, about a minute. small: 3-4 M parameters, several minutes. large: small, grown to 350 M parameters.",
        formatter_class=formatter,
    )
    build.add_argument("name", choices=("tiny", "small", "large"), nargs="?", default="small")
    build.set_defaults(command=_arena_build)

    bench = commands.add_parser(
        "bench",
        help="measure what is gained and what it costs",
        description="\n".join(f"{name:10} {about}" for name, about in BENCHES.items()),
        epilog="example:\n  paceline bench control --json control.json --check",
        formatter_class=formatter,
    )
    bench.add_argument("name", choices=sorted(BENCHES))
    _add_result_options(bench)
    bench.set_defaults(command=_bench)

    certify = commands.add_parser("certify", help="prove what we promise on your own engine").add_subparsers(
        required=True, metavar="WHAT"
    )
    logp = certify.add_parser(
        "logp",
        help="engine's log-probabilities against the learner's",
        description="Sample with the engine, score the same tokens with the learner: FP32 must agree to rounding, BF16 closely.",
    )
    logp.add_argument("--model", default="arena:small", help="checkpoint directory, or arena:small and so on (%(default)s)")
    logp.add_argument("--tokens", type=int, default=2000, help="least number of sampled tokens per precision (%(default)s)")
    _add_result_options(logp)
    logp.set_defaults(command=_certify_logp)
    return parser


def _add_result_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures, spread, goals and environment to FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")


def _train(options: argparse.Namespace) -> int:
    from paceline.config import load_config

    return _run_and_report(load_config(options.config, options.overrides))


def _demo(options: argparse.Namespace) -> int:
    from paceline.config import load_config

    began_s = time.monotonic()
    config = load_config(Path(__file__).parent / "configs" / "demo.toml", options.overrides)
    code = _run_and_report(config)
    print(f"demo: {(time.monotonic() - began_s) / 60:.1f} minutes in all")
    return code


def _run_and_report(config: Config) -> int:
    from paceline import session
    from paceline.evidence.report import write_report
    from paceline.evidence.summary import summary

    directory = session.run(config, cache_root=_cache_root(), progress=_progress)
    for headline in summary(directory).headlines():
        print(f"{headline.label:20} {headline.value:24} {headline.note}")
    print(f"policy: {directory / 'policy' / f'step-{config.run.steps}'}")
    print(f"report: {write_report(directory)}")
    return 0


def _report(options: argparse.Namespace) -> int:
    from paceline.evidence.report import write_report

    print(write_report(options.run))
    return 0


def _arena_build(options: argparse.Namespace) -> int:
    from paceline.arena.policy import resolve

    print(resolve(f"arena:{options.name}", cache_root=_cache_root(), progress=_progress))
    return 0


def _bench(options: argparse.Namespace) -> int:
    return _publish(_benches()[options.name](), options)


def _benches() -> dict[str, Callable[[], Result]]:
    def control() -> Result:
        from paceline.bench.control import run

        return run(progress=_progress)

    def learning() -> Result:
        from paceline.bench.learning import run

        return run(progress=_progress, cache_root=_cache_root(), config_file=Path(__file__).parent / "configs" / "arena.toml")

    def overhead() -> Result:
        from paceline.bench.overhead import run

        return run(progress=_progress, cache_root=_cache_root())

    def sync() -> Result:
        from paceline.bench.sync import run

        return run(progress=_progress, cache_root=_cache_root())

    return {"control": control, "learning": learning, "overhead": overhead, "sync": sync}


def _certify_logp(options: argparse.Namespace) -> int:
    from paceline.arena.policy import resolve
    from paceline.arena.problems import arena_task
    from paceline.evidence.logp import certify
    from paceline.session import load_tokenizer

    model_path = resolve(options.model, cache_root=_cache_root(), progress=_progress)
    task = arena_task(load_tokenizer(model_path), seed=0, num_heldout=256)
    return _publish(certify(model_path, task.heldout, progress=_progress, min_tokens=options.tokens), options)


def _publish(result: Result, options: argparse.Namespace) -> int:
    from paceline.evidence.measure import table

    print(table(result))
    if options.json is not None:
        result.write(options.json)
        print(f"written: {options.json}")
    return int(options.check and not result.all_met)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _cache_root() -> Path:
    return Path(os.environ.get("PACELINE_CACHE", Path.home() / ".cache" / "paceline"))


def _quiet_environment() -> None:
    """What our libraries would otherwise send home or print; nothing that the user has set is changed."""
    for key, value in {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }.items():
        os.environ.setdefault(key, value)


if __name__ == "__main__":
    sys.exit(main())
