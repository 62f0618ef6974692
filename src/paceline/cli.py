"""The `paceline` command. Parses first and imports the heavy libraries later, so that --help answers at once."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.types import PacelineError

if TYPE_CHECKING:
    from paceline.config import Config
    from paceline.evidence.measure import Result

_EPILOG = """start here:
  paceline demo                                    build the small arena policy, train it, write a report (about 10 minutes)
  paceline train configs/arena.toml run.steps=10   train as a config says; any setting can be overridden
  paceline report runs/arena                       turn a run into one HTML page
  paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths 4000/32768      what a run would gain, before it is paid for
"""

BENCHES = {
    "correction": "held-out accuracy with FP8 rollouts, corrected and not, against BF16; three seeds (about 65 minutes)",
    "costs": "step time and acceptance by batch and draft length on arena:large: a prior for the selector (about 7 minutes)",
    "control": "cost of the control plane per rollout, with 16 to 1,024 simulated engines (about 1 minute)",
    "guard": "planted faults: is each answered by the right rung, and are clean batches left alone (about 5 minutes)",
    "history": "history drafter on a second epoch: accepted length, and what its proposals cost (about 5 minutes)",
    "fp8": "FP8 while the policy moves: tensors after each update, KV scales, what that costs (about 30 minutes)",
    "drafter": "does the drafter follow the policy for free and give way at once (about 25 minutes)",
    "learning": "gain in held-out accuracy by RL on the arena, three seeds (about 17 minutes)",
    "overhead": "tokens/s through our engine against bare vllm.LLM (about 3 minutes)",
    "plan": "the simulator behind `paceline plan` against published figures; --arena: against engines here (about 2 minutes)",
    "precision": "FP8 against BF16 with and without speculation: speed, KV capacity, mismatch (about 30 minutes)",
    "rollout": "makespan of a long-tailed batch with speculation against plain vLLM and every rival (about 20 minutes)",
    "selector": "how fast the selector learns from nothing; what a shrinking batch does (about 17 minutes)",
    "sync": "weight transfer against a plain memory copy; fingerprints; refusal of bad pushes (about 2 minutes)",
    "training": "drafter training: packed against one document a pass; stall of a checkpoint (about 5 minutes)",
}

_LEARNED = ("eagle3", "dflash")
"""Kinds of drafter that are trained."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(_spelled_out(sys.argv[1:] if arguments is None else arguments))
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
    report.add_argument("--against", type=Path, metavar="OTHER_RUN", help="draw accepted length beside that of another run")
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

    _add_plan(commands.add_parser("plan", help="what a run would gain on given hardware, and the settings for it"))
    _add_draft(commands.add_parser("draft", help="train a drafter for a policy"))
    _add_export(commands.add_parser("export", help="hand a drafter to others: a checkpoint for stock vLLM, with a card"))

    bench = commands.add_parser(
        "bench",
        help="measure what is gained and what it costs",
        description="\n".join(f"{name:10} {about}" for name, about in BENCHES.items()),
        epilog="example:\n  paceline bench control --json control.json --check",
        formatter_class=formatter,
    )
    bench.add_argument("name", choices=sorted(BENCHES))
    bench.add_argument(
        "overrides", nargs="*", metavar="a.b=value", help="correction, drafter, learning: settings of the runs; costs: precision"
    )
    bench.add_argument("--html", type=Path, metavar="FILE", help="rollout, precision: write tables and pictures as one page")
    costs = "costs: where to write speculation.selector.costs; plan --arena: twice, of BF16 and of FP8, measured if absent"
    bench.add_argument("--costs", type=Path, action="append", default=[], metavar="FILE", help=costs)
    bench.add_argument("--fit", action="store_true", help="plan only: fit the simulator's constants again and print them")
    bench.add_argument("--arena", action="store_true", help="plan only: predicted against measured on this machine's engines")
    _add_result_options(bench)
    bench.set_defaults(command=_bench)

    certify = commands.add_parser(
        "certify",
        help="prove what we promise on your own engine",
        description="Without WHAT: lossless. `paceline certify lossless --help` explains it.",
    ).add_subparsers(required=True, metavar="WHAT")
    _add_certify_lossless(
        certify.add_parser("lossless", help="speculation leaves the distribution as it is", formatter_class=formatter)
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


_CERTIFY_PARTS = ("logp", "lossless")


def _spelled_out(arguments: Sequence[str]) -> list[str]:
    """`paceline certify ...` is short for `paceline certify lossless ...`."""
    rest = list(arguments)
    if rest[:1] == ["certify"] and (len(rest) == 1 or rest[1] not in (*_CERTIFY_PARTS, "-h", "--help")):
        rest.insert(1, "lossless")
    return rest


def _add_certify_lossless(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Is speculation lossless on this engine with these flags? Under 5 minutes on two cores.\n"
        "  sampler   vLLM's rejection sampler on known distributions: chi-square at every position\n"
        "  engines   your engine with speculation and without it: exact two-sample test, false alarm 1 in 1,000\n"
        "  greedy    the same tokens in FP32 at temperature 0\n"
        "  learner   log-probabilities of accepted, recovered and bonus tokens\n"
        "The verdict is LOSSLESS, NOT LOSSLESS or INCONCLUSIVE (hardly anything was drafted)."
    )
    parser.epilog = (
        "examples:\n"
        "  paceline certify --drafter ngram --html certificate.html\n"
        "  paceline certify configs/arena.toml rollout.temperature=0.8 --drafter eagle3:path/to/drafter\n"
        "  paceline certify --plant residual     a fault on purpose: must be NOT LOSSLESS\n"
        "  paceline certify --without-shim       vLLM's CPU sampler as it comes: must be NOT LOSSLESS"
    )
    parser.add_argument(
        "subject", nargs="*", metavar="CONFIG|MODEL|a.b=value", help="TOML file or checkpoint, and settings (arena:small)"
    )
    parser.add_argument(
        "--drafter",
        metavar="KIND[:PATH]",
        help="ngram, history, eagle3[:PATH], dflash[:PATH] (without PATH: the arena's); replaces that of the config (ngram)",
    )
    parser.add_argument("--draft-length", type=int, metavar="K", help="hold the draft length at K; without a config, 3")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the certificate, one page")
    parser.add_argument("--without-shim", action="store_true", help="leave vLLM's sampler as it comes, even where it is wrong")
    parser.add_argument("--plant", metavar="FAULT", help="residual, temperature, stale, accept or logp-shift")
    _add_result_options(parser)
    parser.set_defaults(command=_certify_lossless)


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = (
        "What would speculation, idle-worker drafting, FP8 and asynchrony gain, each alone and all together? No GPU is needed:\n"
        "the loop of `paceline train` runs with simulated engines and learner on a virtual clock. Prints the time of a step by\n"
        "stage, what limits it, how it depends on acceptance and lengths, and a range: nine of ten published results that the\n"
        "simulator was not fitted to lie within it (`paceline bench plan`). docs/plan.md explains the model."
    )
    parser.epilog = (
        "examples:\n"
        "  paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths lengths.txt --config planned.toml\n"
        "  paceline plan path/to/config.json --gpus 64xH200 --lengths runs/arena/metrics.jsonl --html plan.html --sweep\n"
        "  paceline plan configs/mine.toml --gpus 16xA100 --lengths 4000/32768        batch and group size as the config says\n"
        "  paceline plan Qwen/Qwen2.5-7B --gpus 8xH20 --batch 2048 --lengths 2000/8192   where drafts do not pay"
    )
    add = parser.add_argument
    add("model", metavar="MODEL|CONFIG", help="Hugging Face config.json or its directory, known name, or TOML config")
    add("--gpus", required=True, metavar="NxGPU", help="such as 8xH100; a kind that is not known lists those that are")
    add("--batch", type=int, metavar="N", help="rollouts in a step (512, or as the config says)")
    add("--group-size", type=int, metavar="N", help="rollouts of a prompt (16, or as the config says)")
    lengths = "of responses: metrics.jsonl of a run, a file with one length (or length and count) a line, or such as 4000/32768"
    add("--lengths", required=True, metavar="FILE|MEAN/MAX", help=lengths)
    add("--prompt-tokens", type=int, default=256, metavar="N", help="of a usual prompt (%(default)s)")
    add("--drafter", choices=("eagle3", "dflash", "ngram"), default="eagle3", help="who proposes (%(default)s)")
    accepted = "tokens that a verification of 3 drafts emits, bonus included (published: EAGLE-3 2.64, n-gram 2.26)"
    add("--accepted-length", type=float, metavar="A", help=accepted)
    add("--trained-length", type=float, metavar="A", help="the same if the drafter is trained along (published: 2.80)")
    add("--tensor-parallel", type=int, metavar="N", help="GPUs of an engine (the fewest that fit)")
    add("--learner-gpus", type=int, metavar="N", help="GPUs of the learner (what makes a step shortest)")
    add("--lag", type=int, default=1, metavar="N", help="of the asynchronous arms, in batches (%(default)s)")
    measured = "step times measured by `paceline bench costs`, in place of a roofline; twice, if of FP8 too"
    add("--costs", type=Path, action="append", default=[], metavar="FILE", help=measured)
    add("--sweep", action="store_true", help="also the same batch on 8 to 4,096 GPUs; with --html as a picture")
    add("--config", type=Path, metavar="FILE", help="write the recommended settings for `paceline train`")
    add("--html", type=Path, metavar="FILE", help="write the answer as one page")
    add("--json", type=Path, metavar="FILE", help="write figures, ranges and assumptions to FILE")
    parser.set_defaults(command=_plan)


def _add_draft(parser: argparse.ArgumentParser) -> None:
    train = parser.add_subparsers(required=True, metavar="ACTION").add_parser(
        "train",
        help="warm start: an EAGLE-3 or DFlash drafter from the policy's own rollouts",
        description="Train the small model that proposes tokens for MODEL to verify. An engine samples rollouts of MODEL, the\n"
        "learner hands out its hidden states on them, and a decoder layer or two learn to guess several tokens ahead.\n"
        "The result is a checkpoint that stock vLLM serves. At the end a table shows, on rollouts that were kept aside,\n"
        "  overlap           share of drafts that will be accepted at temperature 1, at each draft position\n"
        "  accepted length   tokens per verification that this makes at each draft length; what speculation can gain at most",
        epilog="examples:\n"
        "  paceline draft train arena:small                      into the cache, where drafter path `arena` finds it\n"
        "  paceline draft train MODEL --data prompts.jsonl --out drafter --kind dflash\n"
        "  paceline train config.toml speculation.drafter.kind=dflash speculation.drafter.path=drafter",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("model", metavar="MODEL", help="arena:tiny, arena:small, arena:large, or a checkpoint directory")
    train.add_argument(
        "--kind",
        choices=_LEARNED,
        default="eagle3",
        help="eagle3: a pass for each token, accepts more; dflash: all tokens in one pass (%(default)s)",
    )
    train.add_argument("--out", type=Path, metavar="DIR", help="where to write the drafter; without it an arena policy's is cached")
    train.add_argument("--tokens", type=int, default=1_300_000, metavar="N", help="tokens to train on (%(default)s); needs --out")
    train.add_argument("--data", type=Path, metavar="FILE", help="JSONL file with prompts; not needed for arena policies")
    train.add_argument("--prompt-key", default="prompt", metavar="KEY", help="field of FILE that holds the prompt (%(default)s)")
    train.set_defaults(command=_draft_train)


def _add_export(parser: argparse.ArgumentParser) -> None:
    drafter = parser.add_subparsers(required=True, metavar="WHAT").add_parser(
        "drafter",
        help="a speculators checkpoint that stock vLLM serves, with a model card",
        description="Check a drafter and write it to OUT, whole or not at all. Paceline is not needed to serve it:\n"
        "OUT/README.md states its kind, its policy, acceptance by position, accepted length by draft length, what it was trained\n"
        "on, and the `vllm serve` command. What training did not record, the card calls not recorded.",
        epilog="examples:\n"
        "  paceline export drafter drafter published             what `paceline draft train MODEL --out drafter` wrote\n"
        "  paceline export drafter runs/arena published          the drafter that a run has trained (runs/arena/drafter)\n"
        "  paceline export drafter drafter published --policy Qwen/Qwen3-8B",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    drafter.add_argument("source", type=Path, metavar="SOURCE", help="drafter's checkpoint directory, or a run with drafter/ in it")
    drafter.add_argument("out", type=Path, metavar="OUT", help="directory to write; must not exist")
    drafter.add_argument(
        "--policy", metavar="NAME", help="where others find the policy, for card and config (without it: as training named it)"
    )
    drafter.set_defaults(command=_export_drafter)


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

    print(write_report(options.run, against=options.against))
    return 0


def _arena_build(options: argparse.Namespace) -> int:
    from paceline.arena.policy import resolve

    print(resolve(f"arena:{options.name}", cache_root=_cache_root(), progress=_progress))
    return 0


def _draft_train(options: argparse.Namespace) -> int:
    from paceline.arena import drafter as arena
    from paceline.arena.policy import resolve
    from paceline.draft.provenance import read_evaluation
    from paceline.run import warmstart
    from paceline.session import load_tokenizer

    is_arena = options.model.startswith("arena:")
    if options.out is None and is_arena:
        name = options.model.removeprefix("arena:")
        directory = arena.build_drafter(name, kind=options.kind, cache_root=_cache_root(), progress=_progress)
        evaluation = read_evaluation(directory)
    elif options.out is None or not (is_arena or options.data):
        raise ValueError("draft train: got no --out or no --data; must have both because only arena policies bring prompts")
    else:
        directory, model_path = options.out, resolve(options.model, cache_root=_cache_root(), progress=_progress)
        tokenizer = load_tokenizer(model_path)
        prompts = warmstart.read_prompts(options.data, options.prompt_key, tokenizer) if options.data else arena.prompts(tokenizer)
        recipe = warmstart.WarmStart(train_tokens=options.tokens, rollout_tokens=options.tokens // 3)
        evaluation = warmstart.train_drafter(
            options.kind,
            model_path,
            prompts,
            directory,
            recipe,
            policy=options.model,
            data=arena.DATA if options.data is None else options.data.name,
            progress=_progress,
        )
    print("draft position / length  " + "".join(f"{k:8}" for k in range(1, len(evaluation.overlap) + 1)))
    print("overlap                  " + "".join(f"{value:8.3f}" for value in evaluation.overlap))
    print("accepted length          " + "".join(f"{value:8.2f}" for value in evaluation.accepted_length))
    print(f"{directory}")
    return 0


def _export_drafter(options: argparse.Namespace) -> int:
    from paceline.draft.export import CARD_FILE, export_drafter

    export_drafter(options.source, options.out, policy=options.policy)
    print(f"drafter: {options.out}")
    print(f"card: {options.out / CARD_FILE}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    from paceline.evidence.plan import answer, result, text
    from paceline.evidence.plan_page import sweep, write_plan_page
    from paceline.evidence.recipe import question_of, write

    question = question_of(
        options.model,
        gpus=options.gpus,
        lengths=options.lengths,
        num_rollouts=options.batch,
        group_size=options.group_size,
        prompt_tokens=options.prompt_tokens,
        drafter=options.drafter,
        accepted_length=options.accepted_length,
        trained_length=options.trained_length,
        tensor_parallel=options.tensor_parallel,
        learner_gpus=options.learner_gpus,
        lag=options.lag,
        cost_files=options.costs,
    )
    found = answer(question, progress=_progress)
    scaling = sweep(question, progress=_progress) if options.sweep else None
    print(text(found))
    details = {}
    if scaling is not None:
        details = {"sweep": {"gpus": scaling.gpus, "step_s": scaling.step_s}}
        print("\n    GPUs  plain step  together")
        for place, number in enumerate(scaling.gpus):
            print(f"{number:8}{scaling.step_s['plain'][place]:11.1f}s{scaling.speedups('together')[place]:10.2f}")
    if options.html is not None:
        write_plan_page(found, options.html, scaling=scaling)
        print(f"written: {options.html}")
    if options.config is not None:
        write(found, options.config)
        print(f"\nwritten: {options.config}; fill in data and drafter, then: paceline train {options.config}")
    if options.json is not None:
        result(found, details=details).write(options.json)
        print(f"written: {options.json}")
    return 0


def _bench(options: argparse.Namespace) -> int:
    arguments: dict[str, Any] = {"progress": _progress}
    if options.name == "plan":
        return _bench_plan(options)
    if options.name != "control":  # which needs no policy
        arguments["cache_root"] = _cache_root()
    if options.name in ("correction", "drafter", "learning"):
        arguments["config_file"] = Path(__file__).parent / "configs" / "arena.toml"
        arguments["overrides"] = options.overrides
    if options.name == "costs":
        arguments["costs_file"] = next(iter(options.costs), None)
        arguments["overrides"] = options.overrides
    result: Result = import_module(f"paceline.bench.{options.name}").run(**arguments)
    if options.html is not None and options.name == "rollout":
        from paceline.evidence.rollout_page import write_rollout_page

        write_rollout_page(result, options.html)
        print(f"written: {options.html}")
    if options.html is not None and options.name == "precision":
        from paceline.evidence.precision_page import write_precision_page

        write_precision_page(result, options.html)
        print(f"written: {options.html}")
    return _publish(result, options)


def _bench_plan(options: argparse.Namespace) -> int:
    if options.arena:
        from paceline.bench import plan_arena

        return _publish(plan_arena.run(progress=_progress, cache_root=_cache_root(), cost_files=options.costs), options)
    from paceline.bench import plan

    return _publish(plan.run(progress=_progress, refit=options.fit), options)


def _certify_logp(options: argparse.Namespace) -> int:
    from paceline.arena.policy import resolve
    from paceline.arena.problems import arena_task
    from paceline.evidence.logp import certify
    from paceline.session import load_tokenizer

    model_path = resolve(options.model, cache_root=_cache_root(), progress=_progress)
    task = arena_task(load_tokenizer(model_path), seed=0, num_heldout=256)
    return _publish(certify(model_path, task.heldout, progress=_progress, min_tokens=options.tokens), options)


def _certify_lossless(options: argparse.Namespace) -> int:
    from itertools import islice

    from paceline.arena.policy import resolve
    from paceline.config import load_config
    from paceline.evidence.certificate import write_certificate
    from paceline.evidence.certify import certify
    from paceline.session import load_tokenizer, make_task, with_drafter

    file, overrides = _subject(options.subject)
    config = load_config(file, overrides)
    drafting = _drafting(options.drafter, options.draft_length, has_speculation=config.speculation is not None)
    config = with_drafter(load_config(file, [*overrides, *drafting]), cache_root=_cache_root(), progress=_progress)
    model_path = resolve(config.policy.model, cache_root=_cache_root(), progress=_progress)
    prompts = list(islice(make_task(config, load_tokenizer(model_path)).prompts, 64))
    result = certify(
        model_path,
        prompts,
        config,
        progress=_progress,
        fault=options.plant,
        without_shim=options.without_shim,
        seed=config.run.seed,
    )
    if options.html is not None:
        write_certificate(result, options.html)
        print(f"written: {options.html}")
    code = _publish(result, options)
    print(result.details["verdict"])
    for why in ("failed", "missing", "notes"):
        print(*(f"  {why}: {line}\n" for line in result.details[why]), sep="", end="")
    return code


def _subject(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The config file and the overrides that certify's words stand for."""
    files = [word for word in words if word.endswith(".toml")]
    models = [word for word in words if not word.endswith(".toml") and "=" not in word]
    if len(files) + len(models) > 1:
        raise ValueError(f"certify: got {' '.join((*files, *models))}; must be one config file or one model")
    overrides = [f"policy.model={model}" for model in models] + [word for word in words if "=" in word]
    return (Path(files[0]) if files else None), overrides


def _drafting(drafter: str | None, draft_length: int | None, *, has_speculation: bool) -> list[str]:
    """Overrides for the drafter and a draft length that is held; without any of them, n-grams of 3."""
    overrides: list[str] = []
    if drafter is not None or not has_speculation:
        kind, _, path = (drafter or "ngram").partition(":")
        path = path or ("arena" if kind in _LEARNED else "")
        overrides.append(f'speculation.drafter={{kind = "{kind}"' + (f', path = "{path}"' if path else "") + "}")
    if draft_length is None and not has_speculation:
        draft_length = 3
    if draft_length is not None:
        overrides.append(f"speculation.max_draft_length={draft_length}")
        overrides.append(f'speculation.selector={{kind = "fixed", draft_length = {draft_length}}}')
    return overrides


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
