"""`paceline doctor`, `tune` and `plan`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import model_and_prompts, publish, subject
from paceline.cli.parser import (
    DRAFTER,
    HTML,
    JSON,
    MODEL,
    OUT,
    OVERRIDES,
    PROMPTS,
    RESULT,
    SUBJECT,
    Command,
    Option,
    option,
)
from paceline.context import Context
from paceline.plan.request import Request

if TYPE_CHECKING:
    from paceline.selector.tuning import Tuning

_POLICY = "arena:tiny"
"""The doctor's default: included in the package, with its drafters."""


def _doctor(options: argparse.Namespace, context: Context) -> int:
    from paceline.config import load_config
    from paceline.doctor.examine import examine
    from paceline.doctor.finding import table
    from paceline.doctor.page import write_doctor_page

    file, overrides = subject("doctor", options.subject, default=_POLICY)
    only = [name for name in options.only.split(",") if name]
    findings, result = examine(load_config(file, overrides), context, only=only)
    print(table(findings))
    if options.html is not None:
        write_doctor_page(findings, result, options.html)
        print(f"written: {options.html}")
    code = publish(result, options)
    return 1 if result.figures["failed"] else code


def _tune(options: argparse.Namespace, context: Context) -> int:
    from itertools import islice

    from paceline.config import load_config
    from paceline.devices import on_gpu
    from paceline.files import atomic_directory
    from paceline.measure import Result, environment
    from paceline.report.tuning import write_tuning_page
    from paceline.rollout.speculation import check_drafter
    from paceline.selector.cost_file import save_costs
    from paceline.sessions import tune as session
    from paceline.types import RolloutRequest

    if options.out.exists():
        raise ValueError(f"--out: got {options.out}, which exists; must be new")
    model_path, prompts, _ = model_and_prompts(options, context)
    config = load_config(*subject("tune", [options.model, *options.overrides]))
    speculation = session.speculation_with(options.drafter, config, context)
    engine = config.rollout.engine
    check_drafter(speculation, model_path, engine)
    room = engine.max_model_len - session.room(speculation.max_draft_length)
    fitting = (replace(prompt, token_ids=prompt.token_ids[-room:]) for prompt in prompts)
    requests = [
        RolloutRequest.of(prompt, number, max_tokens=1, temperature=config.rollout.temperature)
        for number, prompt in enumerate(islice(fitting, min(max(session.BATCHES), engine.max_num_seqs)))
    ]
    tuning = session.tune(model_path, speculation, requests, engine, context=context, repetitions=options.passes)
    figures = tuning.figures()
    result = Result(
        name="tune",
        figures=figures,
        spread=dict.fromkeys(figures, 0.0),
        goals={},
        environment=environment(seeds=[0], config=config.model_dump(mode="json")),
        details=tuning.details(),
    )
    with atomic_directory(options.out) as partial:
        save_costs(partial / "costs.json", tuning.costs)
        costs_file = options.out.resolve() / "costs.json"
        command = session.serve_command(model_path, speculation, engine, costs_file, graphs=on_gpu())
        # `exec` lets signals reach the server.
        (partial / "serve.sh").write_text(f'exec {command} "$@"\n', encoding="utf-8")
        write_tuning_page(partial / "tune.html", result, tuning, command)
    print(_table(tuning))
    print(command)
    return publish(result, options)


def _table(tuning: Tuning) -> str:
    """Format tokens per second by batch size and draft length, with the best of each row marked."""
    head = "batch " + "".join(f"{'k=' + str(k):>9}" for k in tuning.lengths) + "   best gains"
    rows = [
        f"{batch:<6}"
        + "".join(f"{tuning.rate(batch, k):8.0f}{'*' if k == tuning.best(batch) else ' '}" for k in tuning.lengths)
        + f"   {tuning.gain(batch):.2f}x"
        for batch in tuning.batches
    ]
    return "\n".join(["tokens/s", head, *rows])


def _plan(options: argparse.Namespace, context: Context) -> int:
    from paceline.plan.answer import answer, result, text
    from paceline.plan.page import sweep, write_plan_page
    from paceline.plan.recipe import question_of, write

    question = question_of(Request(**{field.name: getattr(options, field.name) for field in fields(Request)}))
    found = answer(question, context=context)
    scaling = sweep(question, context=context) if options.sweep else None
    print(text(found))
    details = {}
    if scaling is not None:
        details = {"sweep": {"gpus": scaling.gpus, "step_s": scaling.step_s}}
        print("\n    GPUs  plain step  together")
        for row, number in enumerate(scaling.gpus):
            print(f"{number:8}{scaling.step_s['plain'][row]:11.1f}s{scaling.speedups('together')[row]:10.2f}")
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


def _request_options() -> Iterator[Option]:
    """Yield an option per field of `Request`; a field without a default is required."""
    for field in fields(Request):
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        if field.name == "model":
            yield option(field.name, **field.metadata)
        elif default is MISSING:
            yield option(f"--{field.name}", required=True, **field.metadata)
        else:
            yield option(f"--{field.name.replace('_', '-')}", default=default, **field.metadata)


DOCTOR = Command(
    words="doctor",
    help="check this machine for a run",
    details="""
        Check in minutes whether this machine can run a config. Each check passes, fails or is skipped:
          machine     packages, devices, compiler, Ray
          config      checkpoint, prompts, drafter
          memory      GPU, host, /dev/shm
          engine      starts, generates, samples from the right distribution, accepts as many drafts as expected
          weights     log-probabilities against the learner, pushes through shared memory and by broadcast
        Exit code 1 if a check failed. See docs/doctor.md.
        """,
    examples="""
        paceline doctor --html doctor.html            a small policy of Paceline's; attach the page to a bug report
        paceline doctor mine.toml                     your config: its policy, drafter and prompts
        paceline doctor path/to/checkpoint rollout.engine.tensor_parallel_size=2
        paceline doctor --only shared-memory,sampler  a few checks
        """,
    options=(
        SUBJECT.but(help=f"TOML file or checkpoint, and settings ({_POLICY})"),
        option("--only", metavar="NAME,...", default="", help="run only these checks"),
        HTML,
        *RESULT,
    ),
    run=_doctor,
)
TUNE = Command(
    words="tune",
    help="measure which draft lengths pay on this machine",
    details="""
        Time a few steps of MODEL with its drafter at every batch size and draft length, and write to DIR:
          costs.json   step times and acceptance, for speculation.selector.costs=DIR/costs.json
          serve.sh     the same for `vllm serve`, on GPUs with CUDA graphs for the draft lengths. Accepts further
                       options: sh DIR/serve.sh --port 9000
          tune.html    the draft length that pays at each batch size
        """,
    examples="""
        paceline tune MODEL --drafter DRAFTER --data prompts.jsonl --out tuned
        paceline tune arena:small --drafter arena:small/eagle3 --out tuned
        """,
    options=(
        MODEL,
        OVERRIDES,
        DRAFTER.but(required=True),
        OUT,
        option("--passes", type=int, default=3, metavar="N", help="measurements per batch size and draft length"),
        *PROMPTS,
        *RESULT,
    ),
    run=_tune,
)
PLAN = Command(
    words="plan",
    help="predict the gain of a run on given hardware",
    details="""
        Predict the gain of speculation, idle-worker drafting, FP8 and asynchrony, each alone and all together. Needs no
        GPU: the loop of `paceline train` runs with simulated engines and learner on a virtual clock. Prints the time of
        a step by stage, its limits, its sensitivity to acceptance and lengths, and a range that contained nine of ten
        published results outside the fit (`python -m benchmarks plan`). See docs/plan.md.
        """,
    examples="""
        paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths lengths.txt --config planned.toml
        paceline plan path/to/config.json --gpus 64xH200 --lengths runs/arena/metrics.jsonl --html plan.html --sweep
        paceline plan configs/mine.toml --gpus 16xA100 --lengths 4000/32768           batch and group size of the config
        paceline plan Qwen/Qwen2.5-7B --gpus 8xH20 --batch 2048 --lengths 2000/8192   where drafts do not pay
        """,
    options=(
        *_request_options(),
        option("--sweep", action="store_true", help="also plan the same batch on 8 to 4,096 GPUs; --html plots it"),
        option("--config", type=Path, metavar="FILE", help="write the recommended settings for `paceline train`"),
        HTML,
        JSON.but(help="write figures, ranges and assumptions"),
    ),
    run=_plan,
)
