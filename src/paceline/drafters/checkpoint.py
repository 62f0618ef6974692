"""Checkpoints of learned drafters in speculators' format, which stock vLLM serves.

    kinds.new_drafter ──▶ trainer.py ──▶ save ──▶ vLLM, speculators       widen: the same drafter for a grown policy
    load ────────────────────┘

"Taps" are the auxiliary hidden states of the policy that a drafter reads, numbered as vLLM does: i is after i layers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig

from paceline.files import ChecksumError, atomic_directory, verify_checksums, write_checksums

if TYPE_CHECKING:
    from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig
    from speculators.model import DraftVocabMixin

    class Drafter(DraftVocabMixin, SpeculatorModel):
        """Attributes that all kinds of drafters share."""

        fc: nn.Linear


EAGLE3_TAPS = 3
"""Number of hidden states of the policy that an EAGLE-3 drafter reads; vLLM assumes it for speculators checkpoints."""
_TAPS_KEYS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}


def attention_name(kind: str) -> str:
    """Return the name under which our attention for this kind is registered in transformers."""
    return f"paceline_{kind}"


def layer_settings(policy: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a decoder layer with the policy's shape."""
    return {
        "vocab_size": policy.vocab_size,
        "hidden_size": policy.hidden_size,
        "intermediate_size": policy.intermediate_size,
        "num_attention_heads": policy.num_attention_heads,
        "num_key_value_heads": policy.num_key_value_heads,
        "head_dim": policy.head_dim,
        "max_position_embeddings": policy.max_position_embeddings,
        "rms_norm_eps": policy.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "pad_token_id": None,
    }


def speculators_config(kind: str, policy: PreTrainedConfig, policy_path: Path, draft_length: int) -> SpeculatorsConfig:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_length)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path=str(policy_path), architectures=policy.architectures or []),
    )


def instantiate(config: SpeculatorModelConfig) -> Drafter:
    """Build the model of a config in float32 with our attention. The policy's own weights are frozen."""
    from speculators import SpeculatorModel

    layer = config.transformer_layer_config
    layer._attn_implementation = attention_name(config.speculators_model_type)
    drafter: Any = SpeculatorModel.registered_model_class_from_config(config)(config).float()
    target_size = config.target_hidden_size or layer.hidden_size
    if target_size != layer.hidden_size:  # speculators has no drafter narrower than its policy; vLLM has
        num_taps = drafter.fc.in_features // layer.hidden_size
        drafter.fc = nn.Linear(num_taps * target_size, layer.hidden_size, bias=False)
    for name, weight in drafter.named_parameters():
        weight.requires_grad_(not name.startswith("verifier_"))
    return drafter


def save(
    drafter: Drafter, directory: Path, *, tokenizer: Path | None = None, notes: Callable[[Path], None] | None = None
) -> None:
    """Write a speculators checkpoint atomically.

    `tokenizer` is the policy's tokenizer.json, by which `preflight` detects a different policy with the same vocabulary
    size. `notes` writes further files (provenance.py) before checksums are computed."""
    config = drafter.config.to_dict()
    config["transformer_layer_config"].pop("_attn_implementation", None)
    write_checkpoint(directory, config, weights_of(drafter), tokenizer, notes)


def weights_of(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by name, on the CPU; without a copy if they are there already."""
    return {
        name: weight.detach().cpu().contiguous()
        for name, weight in drafter.state_dict().items()
        if not name.startswith("verifier_")
    }


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    tokenizer: Path | None,
    notes: Callable[[Path], None] | None = None,
) -> None:
    with atomic_directory(directory, durable=True) as partial:
        (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        if tokenizer is not None and tokenizer.is_file():
            shutil.copyfile(tokenizer, partial / "tokenizer.json")
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        if notes is not None:
            notes(partial)
        write_checksums(partial)


def load(directory: Path) -> Drafter:
    """Load the drafter of a checkpoint for training. Verify checksums if there are any."""
    from speculators import SpeculatorModelConfig

    verify_checksums(directory)
    config = SpeculatorModelConfig.from_pretrained(directory)
    drafter = instantiate(config)
    loaded = drafter.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    missing = [name for name in loaded.missing_keys if not name.startswith("verifier_")]
    if missing or loaded.unexpected_keys:
        raise ValueError(
            f"drafter: {directory} lacks {missing} and has unknown {loaded.unexpected_keys}; must be a whole drafter "
            f"of its kind, {config.speculators_model_type}"
        )
    return drafter


def widen(
    source: Path, target: Path, *, policy_path: Path, taps: Sequence[int], notes: Callable[[Path], None] | None = None
) -> None:
    """Write the drafter of a policy for a policy grown from it.

    The grown policy's hidden states end with zeros, so the new columns are zero too."""
    verify_checksums(source)
    config, policy = _read_config(source), policy_config(policy_path)
    weights = load_file(source / "model.safetensors")
    fc_HKD = weights["fc.weight"].unflatten(1, (len(taps), -1))
    padding = policy["hidden_size"] - fc_HKD.shape[-1]
    weights["fc.weight"] = nn.functional.pad(fc_HKD, (0, padding)).flatten(1).contiguous()
    config["target_hidden_size"] = policy["hidden_size"]
    config[_TAPS_KEYS[config["speculators_model_type"]]] = list(taps)
    verifier = {"name_or_path": str(policy_path), "architectures": policy["architectures"]}
    config["speculators_config"]["verifier"] = verifier
    write_checkpoint(target, config, weights, policy_path / "tokenizer.json", notes)


def with_own_embeddings(source: Path, out: Path, *, model_path: Path, dtype: torch.dtype) -> Path:
    """Return `source`, or a copy in `out` that differs in every row from the policy's embedding and output head.

    vLLM shares equal tensors of drafter and policy, and a push to the drafter would then overwrite the policy. Each
    tensor-parallel worker compares its own rows."""
    verify_checksums(source)
    weights = load_file(source / "model.safetensors")
    equal = False
    for name, other_VD in zip(("embed_tokens.weight", "lm_head.weight"), policy_embeddings(model_path), strict=True):
        own_VD = weights.get(name)
        if own_VD is None or other_VD is None or own_VD.shape != other_VD.shape:
            continue
        equal_V = (own_VD.to(dtype) == other_VD.to(dtype)).all(1)
        # Change one weight per row, by enough to survive bfloat16.
        own_VD[:, 0] += equal_V * (0.02 * own_VD[:, 0].abs()).clamp(1e-3)
        equal = equal or bool(equal_V.any())
    if not equal:
        return source
    write_checkpoint(out, _read_config(source), weights, source / "tokenizer.json")
    return out


def policy_embeddings(model_path: Path) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Read the policy's embedding and output head, which are equal if tied. None stands for a missing tensor."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = {"model.embed_tokens.weight", "lm_head.weight"}.intersection(tensors.keys())
            found |= {name: tensors.get_tensor(name) for name in names}
    embedding_VD = found.get("model.embed_tokens.weight")
    return embedding_VD, found.get("lm_head.weight", embedding_VD)


def read_taps(drafter_path: Path, model_path: Path) -> tuple[int, ...]:
    """Return the hidden states of the policy that a checkpoint reads, in vLLM's numbering (i: after i layers)."""
    return taps_among(drafter_path, policy_config(model_path)["num_hidden_layers"])


def taps_among(drafter_path: Path, num_layers: int) -> tuple[int, ...]:
    """Return `read_taps` for a policy with this many layers."""
    config = _read_config(drafter_path)
    return tuple(_taps(config.get("speculators_model_type", "eagle3"), config, num_layers))


def preflight(drafter_path: Path, model_path: Path, *, kind: str, max_model_len: int) -> None:
    """Refuse a mismatch of drafter and policy: vLLM loads most without a warning, and then accepts nothing."""
    who = f"speculation.drafter.path: {drafter_path}"
    config, layer, shapes = read_parts(drafter_path, kind, who=who)
    policy = policy_config(model_path)
    if layer["vocab_size"] != policy["vocab_size"]:
        raise ValueError(
            f"{who} has a vocabulary of {layer['vocab_size']}; must be {policy['vocab_size']} because token ids are "
            f"the policy's: take the drafter of {model_path}, or train one with `paceline draft train`"
        )
    draft_vocabulary = config.get("draft_vocab_size") or layer["vocab_size"]
    if draft_vocabulary != layer["vocab_size"] and shapes.get("d2t") != (draft_vocabulary,):
        raise ValueError(
            f"{who} drafts from {draft_vocabulary} tokens and its d2t is {shapes.get('d2t', 'missing')}; must be a "
            f"table of {draft_vocabulary} because each draft token needs its id in the policy's vocabulary: download "
            "the checkpoint again"
        )
    if layer["max_position_embeddings"] < max_model_len:
        raise ValueError(
            f"{who} knows {layer['max_position_embeddings']} positions; must be at least max_model_len "
            f"({max_model_len}) because drafts beyond them are wrong: lower max_model_len, or train a drafter with "
            "`paceline draft train`"
        )
    _check_taps(who, kind, config, layer, shapes, policy)
    if kind == "dflash" and not 0 <= (mask := _mask_token(config)) < layer["vocab_size"]:
        raise ValueError(
            f"{who} has mask_token_id {mask}; must be one of 0..{layer['vocab_size'] - 1} because its embedding is the "
            "input of every draft position: set it in the drafter's config.json to the token used in training"
        )
    own, other = drafter_path / "tokenizer.json", model_path / "tokenizer.json"
    if own.is_file() and other.is_file() and _vocabulary(own) != _vocabulary(other):
        raise ValueError(
            f"{who} was trained with another tokenizer than {other}; must be the same because equal ids mean "
            f"different text: use the drafter of {model_path}"
        )


def _check_taps(
    who: str,
    kind: str,
    config: dict[str, Any],
    layer: dict[str, Any],
    shapes: dict[str, tuple[int, ...]],
    policy: dict[str, Any],
) -> None:
    """Check that the policy has the hidden states that the drafter reads."""
    num_layers = policy["num_hidden_layers"]
    taps = _taps(kind, config, num_layers)
    target_size = config.get("target_hidden_size") or layer["hidden_size"]
    if target_size != policy["hidden_size"] or shapes["fc.weight"] != (layer["hidden_size"], len(taps) * target_size):
        raise ValueError(
            f"{who} reads {len(taps)} hidden states of {target_size} through fc.weight {shapes['fc.weight']}; must be "
            f"of {policy['hidden_size']}, the policy's hidden size: use the drafter that was trained for it"
        )
    wanted = EAGLE3_TAPS if kind == "eagle3" else max(1, len(taps))
    if len(set(taps)) != wanted or not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"{who} taps layers {taps}; must be {wanted} different ones of 0..{num_layers}, the policy's layers: "
            f"set {_TAPS_KEYS[kind]} in its config.json to the layers used in training, or use another drafter"
        )


def read_parts(path: Path, kind: str, *, who: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return a drafter's config, its layer's config and its shapes by name. `who` starts every error message."""
    weights = sorted(path.glob("*.safetensors"))
    if not (path / "config.json").is_file() or not weights:
        raise ValueError(
            f"{who} has no config.json or no safetensors; must be a checkpoint directory: `paceline draft train` makes "
            "one"
        )
    config = _read_config(path)
    if (found := config.get("speculators_model_type", kind)) != kind:
        raise ValueError(
            f"{who} is a {found!r} drafter; must be {kind!r} for drafter.kind {kind}: choose another kind or drafter"
        )
    try:
        verify_checksums(path)
    except ChecksumError as error:
        raise ValueError(f"{who} is damaged: {error}") from None
    shapes: dict[str, tuple[int, ...]] = {}
    for part in weights:
        try:
            with safe_open(part, "pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{who}: {part.name} cannot be read ({error}); must be whole: copy it again") from None
    if "fc.weight" not in shapes:
        raise ValueError(
            f"{who} has no fc.weight; must be of kind {kind}, which reads several hidden states of the policy"
        )
    return config, config.get("transformer_layer_config", config), shapes


def _taps(kind: str, config: dict[str, Any], num_layers: int) -> list[int]:
    """Return taps in vLLM's numbering, from speculators' format or the original authors' formats."""
    key = _TAPS_KEYS[kind]
    if kind == "dflash":
        layers = (config.get("dflash_config") or {}).get("target_layer_ids", [])
        return config.get(key) or [layer + 1 for layer in layers]
    default = [2, num_layers // 2, num_layers - 3]  # vLLM's
    return config.get(key) or (config.get("eagle_config") or {}).get(key) or default


def _mask_token(config: dict[str, Any]) -> int:
    mask = config.get("mask_token_id", (config.get("dflash_config") or {}).get("mask_token_id"))
    return -1 if mask is None else mask


def policy_config(path: Path) -> dict[str, Any]:
    """Return a policy's config, or its text part if it has several."""
    config = _read_config(path)
    return config.get("text_config", config)


def _read_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text(encoding="utf-8"))


def _vocabulary(tokenizer: Path) -> Any:
    return json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
