"""`paceline tune`: which draft lengths pay for one's own model, drafter, prompts and machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.common import Commands, add_prompt_options, add_result_options, model_and_prompts, publish
from paceline.context import Context

if TYPE_CHECKING:
    from paceline.selector.tuning import Tuning


def add_to(commands: Commands) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "tune",
        help="which draft lengths pay for your model on this machine, and the settings that use it",
        description="Time a few steps of MODEL with its drafter at every batch size and draft length.\n"
        "DIR then holds\n"
        "  costs.json   what a step costs and what is accepted: speculation.selector.costs=DIR/costs.json\n"
        "  serve.sh     the same for `vllm serve`; on a GPU with the CUDA graphs that the draft lengths need.\n"
        "               It takes further options: sh DIR/serve.sh --port 9000\n"
        "  tune.html    which draft length pays at which batch",
        epilog="example:\n"
        "  paceline tune MODEL --drafter DRAFTER --data prompts.jsonl --out tuned\n"
        "  paceline tune arena:small --drafter arena --out tuned",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="arena:tiny, arena:small, arena:large, or a checkpoint directory")
    add("overrides", nargs="*", metavar="a.b=value", help="settings, such as rollout.engine.max_num_seqs=128")
    add("--drafter", required=True, metavar="D", help="a drafter's directory, `ngram`, or for an arena policy `arena`")
    add("--out", type=Path, required=True, metavar="DIR", help="where to write; must not exist")
    add("--passes", type=int, default=3, metavar="N", help="how often every cell is visited (%(default)s)")
    add_prompt_options(parser)
    add_result_options(parser)
    parser.set_defaults(command=_tune)


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
    from paceline.types import GroupId, RolloutRequest

    if options.out.exists():
        raise ValueError(f"--out: got {options.out}, which exists; must be new")
    model_path, prompts, _ = model_and_prompts(options, context)
    config = load_config(None, [f"policy.model={options.model}", *options.overrides])
    speculation = session.speculation_with(options.drafter, options.model, config, context)
    engine = config.rollout.engine
    check_drafter(speculation, model_path, engine)
    room = engine.max_model_len - session.room(speculation.max_draft_length)
    requests = [
        RolloutRequest(
            group_id=GroupId(number),
            index=0,
            prompt_ids=prompt.token_ids[-room:],
            max_tokens=1,
            temperature=config.rollout.temperature,
        )
        for number, prompt in enumerate(islice(prompts, min(max(session.BATCHES), engine.max_num_seqs)))
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
        # Replaced by the server, so that signals reach it; further options are passed on.
        (partial / "serve.sh").write_text(f'exec {command} "$@"\n', encoding="utf-8")
        write_tuning_page(partial / "tune.html", result, tuning, command)
    print(_table(tuning))
    print(command)
    return publish(result, options)


def _table(tuning: Tuning) -> str:
    """Tokens per second by batch size and draft length, the best of a row marked."""
    head = "batch " + "".join(f"{'k=' + str(k):>9}" for k in tuning.lengths) + "   best gains"
    rows = [
        f"{batch:<6}"
        + "".join(f"{tuning.rate(batch, k):8.0f}{'*' if k == tuning.best(batch) else ' '}" for k in tuning.lengths)
        + f"   {tuning.gain(batch):.2f}x"
        for batch in tuning.batches
    ]
    return "\n".join(["tokens/s", head, *rows])
