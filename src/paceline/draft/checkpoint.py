"""Learned drafters on disk: speculators' models, and their checkpoints, which stock vLLM serves.

    kinds.new_drafter ──▶ trainer.py ──▶ save ──▶ vLLM, speculators       widen: the same drafter for a grown policy
    load ────────────────────┘                                           random_drafter: the same cost without the knowledge

How a drafter guesses is in eagle.py and dflash.py. `preflight` compares a checkpoint of anyone's making with a policy.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedConfig

from paceline.origin import is_as_written, write_checksum

if TYPE_CHECKING:
    from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig
    from speculators.model import DraftVocabMixin

    class Drafter(DraftVocabMixin, SpeculatorModel):
        """What the kinds have in common."""

        fc: nn.Linear


EAGLE3_TAPS = 3
"""Hidden states of the policy that an EAGLE-3 drafter reads. vLLM takes this number for granted in speculators checkpoints."""
_TAPS_KEYS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}


def attention_name(kind: str) -> str:
    """Our attention for this kind in transformers; a drafter's layers must have been made with it."""
    return f"paceline_{kind}"


def layer_settings(policy: PreTrainedConfig) -> dict[str, Any]:
    """A decoder layer of the policy's shape."""
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
    """The model of a config, in float32, with our attention; all but what belongs to the policy is trained."""
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


def save(drafter: Drafter, directory: Path, *, tokenizer: Path | None = None) -> None:
    """Write a speculators checkpoint in one move: `vllm serve` and speculators load it as it is. `tokenizer` is the policy's
    tokenizer.json, which lets `preflight` tell another policy with an equally large vocabulary."""
    weights = {name: w.detach().cpu().contiguous() for name, w in drafter.state_dict().items() if not name.startswith("verifier_")}
    _write(directory, _config_text(drafter), weights, tokenizer)


def _config_text(drafter: Drafter) -> str:
    tree = drafter.config.to_dict()
    tree["transformer_layer_config"].pop("_attn_implementation", None)
    return json.dumps(tree, indent=2, sort_keys=True) + "\n"


def _write(directory: Path, config: str, weights: dict[str, torch.Tensor], tokenizer: Path | None) -> None:
    if directory.exists():
        raise ValueError(f"directory: got {directory}, which exists; must be new because a checkpoint is never overwritten")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a crash
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(config, encoding="utf-8")
    if tokenizer is not None and tokenizer.is_file():
        shutil.copyfile(tokenizer, partial / "tokenizer.json")
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    write_checksum(partial)
    partial.rename(directory)


def load(directory: Path) -> Drafter:
    """The drafter of a checkpoint, ready for training."""
    from speculators import SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(directory)
    drafter = instantiate(config)
    loaded = drafter.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    missing = [name for name in loaded.missing_keys if not name.startswith("verifier_")]
    if missing or loaded.unexpected_keys:
        raise ValueError(
            f"drafter: {directory} lacks {missing} and has unknown {loaded.unexpected_keys}; must be a whole drafter of its kind, "
            f"{config.speculators_model_type}"
        )
    return drafter


def widen(source: Path, target: Path, *, policy_path: Path, taps: Sequence[int]) -> None:
    """The same drafter for a policy grown from its own: the taps are as before in their first dimensions and zero in the others, so
    the columns that read those are zero too."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    policy = _policy_config(policy_path)
    weights = load_file(source / "model.safetensors")
    fc_HKD = weights["fc.weight"].unflatten(1, (len(taps), -1))
    padding = policy["hidden_size"] - fc_HKD.shape[-1]
    weights["fc.weight"] = nn.functional.pad(fc_HKD, (0, padding)).flatten(1).contiguous()
    config["target_hidden_size"] = policy["hidden_size"]
    config[_TAPS_KEYS[config["speculators_model_type"]]] = list(taps)
    config["speculators_config"]["verifier"] = {"name_or_path": str(policy_path), "architectures": policy["architectures"]}
    _write(target, json.dumps(config, indent=2, sort_keys=True) + "\n", weights, policy_path / "tokenizer.json")


def with_own_ends(source: Path, out: Path, *, model_path: Path, dtype: torch.dtype) -> Path:
    """A checkpoint whose embedding and output head differ from the policy's: `source` itself, or a copy in `out`.

    vLLM shares what is equal when it loads both, and weights that are then pushed to the drafter land in the policy.
    """
    weights = load_file(source / "model.safetensors")
    embedding_VD = _policy_tensor(model_path, "model.embed_tokens.weight")
    head_VD = _policy_tensor(model_path, "lm_head.weight")
    equal = False
    for name, other_VD in (("embed_tokens.weight", embedding_VD), ("lm_head.weight", embedding_VD if head_VD is None else head_VD)):
        own_VD = weights.get(name)
        if own_VD is not None and other_VD is not None and torch.equal(own_VD.to(dtype), other_VD.to(dtype)):
            own_VD[0, 0] += max(0.02 * abs(float(own_VD[0, 0])), 1e-3)  # one weight, and enough to be seen in bfloat16
            equal = True
    if not equal:
        return source
    _write(out, (source / "config.json").read_text(encoding="utf-8"), weights, source / "tokenizer.json")
    return out


def _policy_tensor(model_path: Path, name: str) -> torch.Tensor | None:
    """One tensor of a policy's checkpoint; None where it has none of that name, as a tied head."""
    for file in sorted(model_path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  not a dict
                return tensors.get_tensor(name)
    return None


def random_drafter(like: Path, out: Path, *, seed: int) -> None:
    """A drafter of the same cost that knows nothing: what must not make an engine slower."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(like / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.ndim == 2:
            weights[name] = (torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])).to(weight.dtype)
    _write(out, (like / "config.json").read_text(encoding="utf-8"), weights, like / "tokenizer.json")


def read_taps(drafter_path: Path, model_path: Path) -> tuple[int, ...]:
    """Hidden states of the policy that a checkpoint reads, in vLLM's numbering (i: after i layers)."""
    config = json.loads((drafter_path / "config.json").read_text(encoding="utf-8"))
    kind = config.get("speculators_model_type", "eagle3")
    return tuple(_taps(kind, config, _policy_config(model_path)["num_hidden_layers"]))


def preflight(drafter_path: Path, model_path: Path, *, kind: str, max_model_len: int) -> None:
    """Refuse a drafter that does not belong to this policy, before an engine loads either. vLLM loads most of these without a word
    and accepts nothing afterwards, which looks like a poor drafter."""
    who = f"speculation.drafter.path: {drafter_path}"
    config, layer, shapes = read_parts(drafter_path, kind, who=who)
    policy = _policy_config(model_path)
    if layer["vocab_size"] != policy["vocab_size"]:
        raise ValueError(
            f"{who} has a vocabulary of {layer['vocab_size']}; must be {policy['vocab_size']} because token ids are the policy's: "
            f"take the drafter of {model_path}, or train one with `paceline draft train`"
        )
    draft_vocabulary = config.get("draft_vocab_size") or layer["vocab_size"]
    if draft_vocabulary != layer["vocab_size"] and shapes.get("d2t") != (draft_vocabulary,):
        raise ValueError(
            f"{who} drafts from {draft_vocabulary} tokens and its d2t is {shapes.get('d2t', 'missing')}; must be a table of "
            f"{draft_vocabulary} because each draft token needs its id in the policy's vocabulary: download the checkpoint again"
        )
    if layer["max_position_embeddings"] < max_model_len:
        raise ValueError(
            f"{who} knows {layer['max_position_embeddings']} positions; must be at least max_model_len ({max_model_len}) because "
            "drafts beyond go wrong, and long rollouts are the ones that everything waits for: lower max_model_len, or train a "
            "drafter with `paceline draft train`"
        )
    _check_taps(who, kind, config, layer, shapes, policy)
    if kind == "dflash" and not 0 <= (mask := _mask_token(config)) < layer["vocab_size"]:
        raise ValueError(
            f"{who} has mask_token_id {mask}; must be one of 0..{layer['vocab_size'] - 1} because its embedding stands for every "
            "token that is to be drafted: set it in the drafter's config.json to the one that it was trained with"
        )
    own, other = drafter_path / "tokenizer.json", model_path / "tokenizer.json"
    if own.is_file() and other.is_file() and _vocabulary(own) != _vocabulary(other):
        raise ValueError(
            f"{who} was trained with another tokenizer than {other}; must be the same because equal ids would mean different "
            f"text: take the drafter of {model_path}"
        )


def _check_taps(
    who: str, kind: str, config: dict[str, Any], layer: dict[str, Any], shapes: dict[str, tuple[int, ...]], policy: dict[str, Any]
) -> None:
    """That the policy has the hidden states which the drafter reads."""
    num_layers = policy["num_hidden_layers"]
    taps = _taps(kind, config, num_layers)
    target_size = config.get("target_hidden_size") or layer["hidden_size"]
    if target_size != policy["hidden_size"] or shapes["fc.weight"] != (layer["hidden_size"], len(taps) * target_size):
        raise ValueError(
            f"{who} reads {len(taps)} hidden states of {target_size} through fc.weight {shapes['fc.weight']}; must be of "
            f"{policy['hidden_size']} because that is the policy's hidden size: take the drafter that was trained for this policy"
        )
    wanted = EAGLE3_TAPS if kind == "eagle3" else max(1, len(taps))
    if len(set(taps)) != wanted or not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"{who} taps layers {taps}; must be {wanted} different ones of 0..{num_layers} because that is what the policy has: "
            f"set {_TAPS_KEYS[kind]} in its config.json to those that it was trained with, or take another drafter"
        )


def read_parts(path: Path, kind: str, *, who: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]:
    """Config, config of its layer, and shapes by name, without loading weights; the checksum is verified where there is one. `who`
    begins every complaint."""
    file, weights = path / "config.json", sorted(path.glob("*.safetensors"))
    if not file.is_file() or not weights:
        raise ValueError(
            f"{who} has no config.json or no safetensors; must be a checkpoint directory: `paceline draft train` makes one"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    found = config.get("speculators_model_type", kind)
    if found != kind:
        raise ValueError(f"{who} is a {found!r} drafter; must be {kind!r} for drafter.kind {kind}: choose another kind or drafter")
    if is_as_written(path) is False:
        raise ValueError(f"{who} differs from its checksum; must be whole because a damaged drafter loads silently: copy it again")
    shapes: dict[str, tuple[int, ...]] = {}
    for part in weights:
        try:
            with safe_open(part, "pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{who}: {part.name} cannot be read ({error}); must be whole: copy it again") from None
    if "fc.weight" not in shapes:
        raise ValueError(f"{who} has no fc.weight; must be of kind {kind}, which reads several hidden states of the policy")
    return config, config.get("transformer_layer_config", config), shapes


def _taps(kind: str, config: dict[str, Any], num_layers: int) -> list[int]:
    """In vLLM's numbering (i: after i layers), of checkpoints of speculators and of the drafters' first authors."""
    key = _TAPS_KEYS[kind]
    if kind == "dflash":
        return config.get(key) or [layer + 1 for layer in (config.get("dflash_config") or {}).get("target_layer_ids", [])]
    default = [2, num_layers // 2, num_layers - 3]  # vLLM's
    return config.get(key) or (config.get("eagle_config") or {}).get(key) or default


def _mask_token(config: dict[str, Any]) -> int:
    mask = config.get("mask_token_id", (config.get("dflash_config") or {}).get("mask_token_id"))
    return -1 if mask is None else mask


def _policy_config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def _vocabulary(tokenizer: Path) -> Any:
    return json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]
