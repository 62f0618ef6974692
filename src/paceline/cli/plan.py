"""`paceline plan`: what a run would gain on given hardware, and the settings for it."""

from __future__ import annotations

import argparse
from dataclasses import MISSING, fields
from pathlib import Path

from paceline.cli.common import Commands
from paceline.context import Context
from paceline.plan.request import Request


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "plan",
        help="what a run would gain on given hardware, and the settings for it",
        description="What would speculation, idle-worker drafting, FP8 and asynchrony gain, each alone and all "
        "together? No GPU is needed:\n"
        "the loop of `paceline train` runs with simulated engines and learner on a virtual clock. Prints the time of "
        "a step by\n"
        "stage, what limits it, how it depends on acceptance and lengths, and a range: nine of ten published results "
        "that the\n"
        "simulator was not fitted to lie within it (`python -m benchmarks plan`). docs/plan.md explains the model.",
        epilog="examples:\n"
        "  paceline plan Qwen/Qwen3-8B --gpus 8xH100 --batch 512 --lengths lengths.txt --config planned.toml\n"
        "  paceline plan path/to/config.json --gpus 64xH200 --lengths runs/arena/metrics.jsonl --html plan.html "
        "--sweep\n"
        "  paceline plan configs/mine.toml --gpus 16xA100 --lengths 4000/32768        batch and group size as the "
        "config says\n"
        "  paceline plan Qwen/Qwen2.5-7B --gpus 8xH20 --batch 2048 --lengths 2000/8192   where drafts do not pay",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in fields(Request):
        positional = bool(option.metadata.get("positional"))
        name = option.name if positional else "--" + option.name.replace("_", "-")
        settings = {key: value for key, value in option.metadata.items() if key != "positional"}
        if not positional:
            default = list(option.default) if isinstance(option.default, tuple) else option.default
            settings |= {"required": True} if default is MISSING else {"default": default}
        parser.add_argument(name, **settings)
    add = parser.add_argument
    add("--sweep", action="store_true", help="also the same batch on 8 to 4,096 GPUs; with --html as a picture")
    add("--config", type=Path, metavar="FILE", help="write the recommended settings for `paceline train`")
    add("--html", type=Path, metavar="FILE", help="write the answer as one page")
    add("--json", type=Path, metavar="FILE", help="write figures, ranges and assumptions to FILE")
    parser.set_defaults(command=_plan)


def _plan(options: argparse.Namespace, context: Context) -> int:
    from paceline.plan.answer import answer, result, text
    from paceline.plan.page import sweep, write_plan_page
    from paceline.plan.recipe import question_of, write

    question = question_of(Request(**{option.name: getattr(options, option.name) for option in fields(Request)}))
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
