"""`paceline certify`: prove what we promise on the user's own engine. Without a WHAT it is `certify lossless`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import LEARNED, Commands, add_result_options, add_subject, publish, subject
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.certify.subject import EngineFault
    from paceline.config import Config
    from paceline.types import Prompt

_PARTS = ("logp", "lossless")
_INTERPRETED = tuple(
    f"rollout.engine.{setting}"
    for setting in ("max_num_seqs=32", "start_deadline_s=1500", "call_deadline_s=600", "progress_deadline_s=900")
)
"""A small batch, since nothing runs in parallel, and deadlines for an interpreter on a busy machine."""


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `certify ...` spelled out as `certify lossless ...`."""
    rest = list(arguments)
    if rest[:1] == ["certify"] and (len(rest) == 1 or rest[1] not in (*_PARTS, "-h", "--help")):
        rest.insert(1, "lossless")
    return rest


def add_to(commands: Commands) -> None:
    parts = commands.add_parser(
        "certify",
        help="prove what we promise on your own engine",
        description="Without WHAT: lossless. `paceline certify lossless --help` explains it.",
    ).add_subparsers(required=True, metavar="WHAT")
    _add_lossless(parts)
    _add_logp(parts)


def _add_lossless(parts: Commands) -> None:
    parser: argparse.ArgumentParser = parts.add_parser(
        "lossless",
        help="speculation leaves the distribution as it is",
        description="Is speculation lossless on this engine with these flags? Under 5 minutes on two cores.\n"
        "  sampler   the engine's rejection sampler on known distributions: chi-square at every position\n"
        "  engines   your engine with speculation and without it: exact two-sample test, false alarm 1 in 1,000\n"
        "  greedy    the same tokens in FP32 at temperature 0\n"
        "  learner   log-probabilities of accepted, recovered and bonus tokens\n"
        "The verdict is LOSSLESS, NOT LOSSLESS or INCONCLUSIVE (hardly anything was drafted).\n"
        "vLLM samples by model runner V2 on GPUs and by V1 on CPUs; certify tests the runner of your engine.",
        epilog="examples:\n"
        "  paceline certify --drafter ngram --html certificate.html\n"
        "  paceline certify configs/arena.toml rollout.temperature=0.8 --drafter eagle3:path/to/drafter\n"
        "  paceline certify --drafter vllm:draft_model:arena:tiny\n"
        "  paceline certify --plant residual     a fault on purpose: must be NOT LOSSLESS\n"
        "  paceline certify --without-shim       vLLM's CPU sampler as it comes: must be NOT LOSSLESS",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_lossless_options(parser)
    parser.set_defaults(command=_certify_lossless)


def add_lossless_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser)
    add = parser.add_argument
    drafters = (
        "ngram, history, eagle3[:PATH], dflash[:PATH] (without PATH: the arena's), or vllm:METHOD[:MODEL]; replaces "
        "that of the config (ngram)"
    )
    add("--drafter", metavar="KIND[:PATH]", help=drafters)
    add("--draft-length", type=int, metavar="K", help="hold the draft length at K; without a config, 3")
    add("--html", type=Path, metavar="FILE", help="write the certificate, one page")
    add("--without-shim", action="store_true", help="leave vLLM's sampler as it comes, even where it is wrong")
    add("--runner", choices=("v2",), help="use this model runner of vLLM's (default: as vLLM chooses)")
    plant = "residual, temperature, stale, accept or logp-shift; with --runner v2 inside the running engine too"
    add("--plant", metavar="FAULT", help=plant)
    add("--quick", action="store_true", help="few samples: shows that all parts run, but finds only gross faults")
    add_result_options(parser)


def _add_logp(parts: Commands) -> None:
    parser: argparse.ArgumentParser = parts.add_parser(
        "logp",
        help="engine's log-probabilities against the learner's",
        description="Sample with the engine, score the same tokens with the learner: FP32 must agree to rounding, "
        "BF16 closely.",
    )
    add_subject(parser)
    add = parser.add_argument
    add("--model", help="checkpoint directory, or arena:small and so on; replaces that of the config (arena:small)")
    add("--tokens", type=int, default=2000, help="least number of sampled tokens per precision (%(default)s)")
    add_result_options(parser)
    parser.set_defaults(command=_certify_logp)


def _certify_lossless(options: argparse.Namespace, context: Context) -> int:
    if options.runner == "v2":
        from paceline.devices import on_gpu

        if not on_gpu():
            raise ValueError(
                "--runner: got v2 on a machine without a GPU; `python -m benchmarks certify --runner v2` in a checkout "
                "interprets its kernels on the CPU"
            )
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    return certify_lossless(options, context)


def certify_lossless(
    options: argparse.Namespace,
    context: Context,
    *,
    interpreted: bool = False,
    engine_fault: EngineFault | None = None,
) -> int:
    """Run `paceline certify lossless`; `interpreted` if the engines' kernels run under Triton's interpreter."""
    from paceline.certify.certificate import write_certificate
    from paceline.certify.engines import certify
    from paceline.certify.subject import INTERPRETED, INTERPRETED_QUICK, QUICK, Effort
    from paceline.config import load_config
    from paceline.sessions.train import with_drafter

    file, overrides = subject("certify", options.subject)
    if interpreted:
        policy = ["policy.model=arena:tiny"] if file is None else []
        overrides = [*policy, *_INTERPRETED, *overrides]
    config = load_config(file, overrides)
    drafting = _drafting(
        options.drafter,
        options.draft_length,
        has_speculation=config.speculation is not None,
        default="eagle3" if interpreted else "ngram",
    )
    config = with_drafter(load_config(file, [*overrides, *drafting]), context)
    model_path, prompts = _policy_and_prompts(config, 64, context)
    quick, full = (INTERPRETED_QUICK, INTERPRETED) if interpreted else (QUICK, Effort())
    result = certify(
        model_path,
        prompts,
        config,
        context=context,
        fault=options.plant,
        engine_fault=engine_fault,
        without_shim=options.without_shim,
        effort=quick if options.quick else full,
        seed=config.run.seed,
    )
    if options.html is not None:
        write_certificate(result, options.html)
        print(f"written: {options.html}")
    code = publish(result, options)
    print(result.details["verdict"])
    for why in ("failed", "missing", "notes"):
        print(*(f"  {why}: {line}\n" for line in result.details[why]), sep="", end="")
    return code


def _certify_logp(options: argparse.Namespace, context: Context) -> int:
    from paceline.certify.logp import certify
    from paceline.config import load_config

    file, overrides = subject("certify", options.subject)
    if options.model is not None:
        overrides = [*overrides, f"policy.model={options.model}"]
    config = load_config(file, overrides)
    model_path, prompts = _policy_and_prompts(config, 256, context)
    result = certify(
        model_path, prompts, config.rollout, context=context, min_tokens=options.tokens, seed=config.run.seed
    )
    return publish(result, options)


def _policy_and_prompts(config: Config, num_prompts: int, context: Context) -> tuple[Path, list[Prompt]]:
    """Return the policy that a config names, and the first prompts of its data."""
    from paceline.sessions.train import load_tokenizer
    from paceline.sessions.workloads import make_task, resolve_policy

    model_path = resolve_policy(config.policy.model, context)
    # Without held-out rows: a file with fewer rows than a run would hold out has prompts enough.
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
    return model_path, list(islice(make_task(config, load_tokenizer(model_path)).prompts, num_prompts))


def _drafting(
    drafter: str | None, draft_length: int | None, *, has_speculation: bool, default: str = "ngram"
) -> list[str]:
    """Return overrides for the drafter and a fixed draft length; without any of them, the default's and 3."""
    overrides: list[str] = []
    if drafter is not None or not has_speculation:
        kind, _, path = (drafter or default).partition(":")
        named = {"path": path or ("arena" if kind in LEARNED else "")}
        if kind == "vllm":
            named = dict(zip(("settings.method", "settings.model"), path.split(":", 1), strict=False))
        overrides.append(f'speculation.drafter={{kind = "{kind}"}}')
        overrides += [f'speculation.drafter.{key}="{value}"' for key, value in named.items() if value]
    if draft_length is None and not has_speculation:
        draft_length = 3
    if draft_length is not None:
        overrides.append(f"speculation.max_draft_length={draft_length}")
        overrides.append(f'speculation.selector={{kind = "fixed", draft_length = {draft_length}}}')
    return overrides
