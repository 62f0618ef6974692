"""`paceline export drafter`: a speculators checkpoint that stock vLLM serves, with a model card.

checkpoint or RUN/drafter/ ──▶ check ──▶ OUT: weights, config, checksums, evaluation, provenance, README.md
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.drafters.checkpoint import read_parts
from paceline.drafters.provenance import (
    EVALUATION_FILE,
    PROVENANCE_FILE,
    Evaluation,
    Provenance,
    read_evaluation,
    read_provenance,
    write_evaluation,
    write_provenance,
)
from paceline.files import CHECKSUM_FILE, atomic_directory, copy_verified, write_checksums

CARD_FILE = "README.md"
_KINDS = {"eagle3": "EAGLE-3, one pass per token", "dflash": "DFlash, one pass for all tokens"}
_UNKNOWN = "not recorded"


def drafter_kind(directory: Path, *, key: str) -> str:
    """Return the kind of the drafter in a directory. Errors start with `key`."""
    file = directory / "config.json"
    kind = json.loads(file.read_text(encoding="utf-8")).get("speculators_model_type") if file.is_file() else None
    if kind not in _KINDS or not (directory / "model.safetensors").is_file():
        raise ValueError(
            f"{key}: {directory} is not a drafter of kind {' or '.join(_KINDS)} with a model.safetensors (kind: {kind})"
            "; must be a speculators checkpoint because vLLM reads the kind from it: `paceline draft train` makes one"
        )
    return kind


def export_drafter(source: Path, out: Path, *, policy: str | None = None) -> None:
    """Write the drafter of a checkpoint or a run to `out`. `policy` is the policy's public name, if not as recorded."""
    if out.exists():
        raise ValueError(f"OUT: got {out}, which exists; must not exist because an export never overwrites")
    directory = find_drafter(source)
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = drafter_kind(directory, key="SOURCE")
    read_parts(directory, kind, who=f"SOURCE: {directory}")
    evaluation = read_evaluation(directory) if (directory / EVALUATION_FILE).is_file() else None
    provenance = read_provenance(directory) if (directory / PROVENANCE_FILE).is_file() else None
    if policy is not None:
        config["speculators_config"]["verifier"]["name_or_path"] = policy
    if provenance is not None:
        provenance = replace(provenance, policy=policy or _shown(provenance.policy))
    with atomic_directory(out) as partial:
        for name in ("model.safetensors", "tokenizer.json"):
            if (directory / name).is_file():
                copy_verified(directory / name, partial / name)
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if evaluation is not None:
            write_evaluation(partial, evaluation)
        if provenance is not None:
            write_provenance(partial, provenance)
        (partial / CARD_FILE).write_text(card(config, evaluation, provenance), encoding="utf-8")
        write_checksums(partial)


def find_drafter(source: Path) -> Path:
    """Return the drafter's directory. Check for a run first, because a run has a config.json too."""
    if (source / "drafter" / "config.json").is_file():
        return source / "drafter"
    if (source / "metrics.jsonl").is_file():
        raise ValueError(
            f"SOURCE: run {source} has no drafter/ in it; must be a run that trained one, or a drafter's checkpoint "
            "(speculation.drafter.path in the run's config.json)"
        )
    if not (source / "config.json").is_file():
        raise ValueError(
            f"SOURCE: got {source}, which has no config.json; must be a drafter's checkpoint or a run with drafter/ in "
            "it: `paceline draft train` makes a checkpoint"
        )
    return source


def speculative_config(config: dict[str, Any], model: str) -> str:
    """Return vLLM's --speculative-config for a drafter with this config.json."""
    length = config["speculators_config"]["proposal_methods"][0]["speculative_tokens"]
    return json.dumps({"method": config["speculators_model_type"], "model": model, "num_speculative_tokens": length})


def card(config: dict[str, Any], evaluation: Evaluation | None, provenance: Provenance | None) -> str:
    """Return the model card in Markdown, with Hugging Face's front matter."""
    kind, layer = config["speculators_model_type"], config["transformer_layer_config"]
    verifier = config["speculators_config"]["verifier"]
    policy = _shown(verifier["name_or_path"] or _UNKNOWN) if provenance is None else provenance.policy
    parts = [
        f"---\nlibrary_name: speculators\ntags: [speculative-decoding, {kind}, vllm]\n---",
        f"# {kind} drafter for {policy}",
        "Proposes tokens for its policy to verify. The output keeps the policy's distribution; a step emits more.",
        _table(
            ("", ""),
            [
                ("kind", f"{kind} ({_KINDS[kind]})"),
                ("policy", f"`{policy}` ({', '.join(verifier['architectures'])})"),
                ("vocabulary", f"{config['draft_vocab_size']:,} of {layer['vocab_size']:,} tokens"),
                ("longest context", f"{layer['max_position_embeddings']:,} tokens"),
                ("format", f"speculators {config['speculators_version']}, `{CHECKSUM_FILE}` beside the weights"),
            ],
        ),
        "## Acceptance",
        _acceptance(evaluation),
        "## Data and provenance",
        _provenance(provenance),
        "## Serve it",
        f"Stock vLLM needs nothing else. POLICY is the policy above, DRAFTER this directory:\n\n```bash\n"
        f"vllm serve POLICY --host 127.0.0.1 --speculative-config '{speculative_config(config, 'DRAFTER')}'\n```",
        '`"draft_sample_method": "probabilistic"` in that JSON accepts more at temperatures above 0. On its CPU '
        "backend, vLLM 0.32 and before sample wrongly under speculation at any temperature above 0 (vLLM issue 55005); "
        "greedy output is right.",
    ]
    return "\n\n".join(parts) + "\n"


def _shown(policy: str) -> str:
    """Replace the user's home directory by ~, since cards are published."""
    return policy.replace(f"{Path.home()}/", "~/")


def _acceptance(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return f"{_UNKNOWN.capitalize()}."
    lengths = range(1, len(evaluation.overlap) + 1)
    rows = [
        ("acceptance at this position (overlap)", *(f"{value:.3f}" for value in evaluation.overlap)),
        ("accepted length at this draft length", *(f"{value:.2f}" for value in evaluation.accepted_length)),
    ]
    return (
        _table(("draft position / draft length", *map(str, lengths)), rows)
        + f"\n\nAt temperature 1, on {evaluation.num_tokens:,} held-out tokens of the policy's rollouts. Overlap is "
        "the mean over tokens of sum_v min(p_v, q_v), p the policy's distribution and q the drafter's: the share of "
        "drafts that are accepted, given that earlier ones were. Accepted length is the expected number of tokens per "
        "verification, bonus token included."
    )


def _provenance(provenance: Provenance | None) -> str:
    if provenance is None:
        return f"{_UNKNOWN.capitalize()}."
    steps = provenance.rl_steps
    followed = f"{steps:,}: it was trained while the policy was" if steps else "0: trained for a fixed policy"
    return _table(
        ("", ""),
        [
            ("data", f"rollouts of the policy itself; prompts: {provenance.data}"),
            ("began from", provenance.start),
            ("tokens trained on", f"{provenance.num_tokens:,}"),
            ("RL steps followed", followed),
            ("seed", str(provenance.seed)),
            ("versions", ", ".join(f"{package} {number}" for package, number in provenance.versions.items())),
            ("date", provenance.created),
        ],
    )


def _table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
