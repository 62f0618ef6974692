"""`paceline certify`: verify losslessness on the user's engine."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import LEARNED, publish, subject
from paceline.cli.parser import DRAFTER, HTML, MODEL, QUICK, RESULT, SUBJECT, TOKENS, Command, option
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.certify.subject import Effort, Fault
    from paceline.config import Config
    from paceline.types import Prompt


def certify_lossless(
    options: argparse.Namespace, context: Context, *, fault: Fault | None = None, effort: Effort | None = None
) -> int:
    """Run `paceline certify lossless`, with a planted `fault` or another effort if there is one."""
    from paceline.certify.certificate import write_certificate
    from paceline.certify.engines import certify
    from paceline.certify.subject import QUICK
    from paceline.config import load_config
    from paceline.sessions.train import with_drafter

    file, overrides = subject("certify", options.subject)
    config = load_config(file, overrides)
    verification = options.verification
    if verification is None and config.speculation is None and not options.without_shim:
        verification = "coupled"
    drafting = _drafting(
        options.drafter,
        options.draft_length,
        policy=config.policy.model,
        has_speculation=config.speculation is not None,
        exact=verification == "coupled",
    )
    if verification is not None:
        drafting.append(f"speculation.verification={verification}")
    config = with_drafter(load_config(file, [*overrides, *drafting]), context)
    model_path, prompts = _policy_and_prompts(config, 64, context)
    result = certify(
        model_path,
        prompts,
        config,
        context=context,
        fault=fault,
        without_shim=options.without_shim,
        effort=QUICK if options.quick and effort is None else effort,
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

    model = [] if options.model is None else [f"policy.model={options.model}"]
    config = load_config(*subject("certify", [*options.subject, *model]))
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
    # Hold out no rows: small files would have no prompts left.
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"every": 0})})
    return model_path, list(islice(make_task(config, load_tokenizer(model_path)).prompts, num_prompts))


def _drafting(
    drafter: str | None, draft_length: int | None, *, policy: str, has_speculation: bool, exact: bool = False
) -> list[str]:
    """Return overrides for the drafter and a fixed draft length; the defaults are n-grams and 3, or all draft lengths
    up to the largest in an exact comparison."""
    from paceline.sessions.workloads import arena_policy

    overrides: list[str] = []
    if drafter is not None or not has_speculation:
        kind, _, path = (drafter or "ngram").partition(":")
        named = {"path": path or (f"{policy}/{kind}" if kind in LEARNED and arena_policy(policy) else "")}
        if kind == "vllm":
            named = dict(zip(("settings.method", "settings.model"), path.split(":", 1), strict=False))
        overrides.append(f'speculation.drafter={{kind = "{kind}"}}')
        overrides += [f'speculation.drafter.{key}="{value}"' for key, value in named.items() if value]
    if draft_length is None and not has_speculation and not exact:
        draft_length = 3
    if draft_length is not None:
        overrides.append(f"speculation.max_draft_length={draft_length}")
        overrides.append(f'speculation.selector={{kind = "fixed", draft_length = {draft_length}}}')
    return overrides


LOSSLESS = Command(
    words="certify lossless",
    help="test that speculation preserves the distribution (the default)",
    details="""
        Test whether speculation is lossless on this engine with these flags. Takes under 5 minutes on two cores.
        With coupled verification the test is exact: the same tokens with and without speculation at every draft
        length, at random draft lengths and under preemption, for temperatures from 0 to 1.3.
        With standard verification it is statistical:
          sampler   the engine's rejection sampler on known distributions: chi-square at every position
          engines   your engine with and without speculation: exact two-sample test, false-positive rate 1 in 1,000
          greedy    the same tokens in FP32 at temperature 0
          learner   log-probabilities of accepted, recovered and bonus tokens
        The verdict is LOSSLESS, NOT LOSSLESS or INCONCLUSIVE (hardly anything was drafted).
        vLLM samples by model runner V2 on GPUs and by V1 on CPUs; certify tests the runner of your engine.
        """,
    examples="""
        paceline certify --drafter ngram --html certificate.html
        paceline certify configs/arena.toml rollout.temperature=0.8 --drafter eagle3:path/to/drafter
        paceline certify --drafter vllm:draft_model:arena:tiny
        paceline certify --without-shim       vLLM's CPU sampler without our fix: must be NOT LOSSLESS
        """,
    options=(
        SUBJECT,
        DRAFTER.but(
            metavar="KIND[:PATH]",
            help="ngram, history, eagle3[:PATH], dflash[:PATH] (default PATH: the arena's) or vllm:METHOD[:MODEL], "
            "instead of the config's (ngram)",
        ),
        option(
            "--draft-length",
            type=int,
            metavar="K",
            help="draft length of standard verification (without a config: 3), the largest one of coupled verification",
        ),
        option(
            "--verification",
            choices=("coupled", "standard"),
            help="verification of drafts, instead of the config's (without a config: coupled)",
        ),
        HTML,
        option("--without-shim", action="store_true", help="do not fix vLLM's sampler, even where it is wrong"),
        QUICK.but(help="few samples: runs every part, but finds only gross faults"),
        *RESULT,
    ),
    run=certify_lossless,
)
LOGP = Command(
    words="certify logp",
    help="compare the engine's log-probabilities with the learner's",
    details="Sample with the engine and score the same tokens with the learner: FP32 agrees to rounding, BF16 closely.",
    examples="paceline certify logp configs/arena.toml --tokens 5000",
    options=(
        SUBJECT,
        option("--model", metavar="MODEL", help=f"{MODEL.settings['help']}, instead of the config's"),
        TOKENS.but(default=2000, help="least number of sampled tokens per precision"),
        *RESULT,
    ),
    run=_certify_logp,
)
