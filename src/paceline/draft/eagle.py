"""The learned drafter: speculators' EAGLE-3 model, and its checkpoints, which stock vLLM serves.

    new_drafter ──▶ trainer.py ──▶ save ──▶ vLLM, speculators       widen: the same drafter for a grown policy
    load ──────────────┘                                           random_drafter: the same cost without the knowledge

How it guesses and what it learns from is in unroll.py. `preflight` compares a checkpoint of anyone's making with a policy.
"""

from __future__ import annotations

import hashlib
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
from transformers import LlamaConfig, PreTrainedConfig

from paceline.draft.unroll import ATTENTION

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

CHECKSUM_FILE = "model.safetensors.sha256"
NUM_TAPS = 3
"""Hidden states of the policy that a drafter reads. vLLM takes this number for granted in speculators checkpoints."""


def new_drafter(
    policy: PreTrainedConfig,
    *,
    taps: Sequence[int],
    policy_path: Path,
    embedding_VD: torch.Tensor,
    head_VD: torch.Tensor,
    tap_scale_K: Sequence[float],
    seed: int,
    draft_length: int = 7,
) -> Eagle3DraftModel:
    """An untrained drafter as wide as the policy, with one layer of its shape.

    It starts from the policy's embedding and output head, which it then trains as its own. `tap_scale_K` is the root mean square of
    each tap: the residual stream grows from layer to layer, and without it the last tap would drown the others.
    """
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    if len(taps) != NUM_TAPS:
        raise ValueError(f"taps: got {list(taps)}; must be {NUM_TAPS} because vLLM hands that many to an EAGLE-3 drafter")
    layer = LlamaConfig(
        vocab_size=policy.vocab_size,
        hidden_size=policy.hidden_size,
        intermediate_size=policy.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=policy.num_attention_heads,
        num_key_value_heads=policy.num_key_value_heads,
        head_dim=policy.head_dim,
        max_position_embeddings=policy.max_position_embeddings,
        rms_norm_eps=policy.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=policy.vocab_size,
        norm_before_residual=True,
        embed_requires_grad=True,
        eagle_aux_hidden_state_layer_ids=list(taps),
        target_hidden_size=policy.hidden_size,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=draft_length)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(policy_path), architectures=policy.architectures or []),
        ),
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        drafter = _instantiate(Eagle3DraftModel, config)
        drafter.embed_tokens.weight.copy_(embedding_VD)
        drafter.lm_head.weight.copy_(head_VD)
        fan_in = drafter.fc.in_features
        scale_C = torch.tensor(tap_scale_K).repeat_interleave(fan_in // len(taps))
        drafter.fc.weight.copy_(torch.randn(drafter.fc.weight.shape) / (math.sqrt(fan_in) * scale_C))
    return drafter


def _instantiate(cls: type[Eagle3DraftModel], config: Any) -> Eagle3DraftModel:
    """The model of a config, in float32, with our attention; all but what belongs to the policy is trained."""
    layer = config.transformer_layer_config
    layer._attn_implementation = ATTENTION
    drafter = cls(config).float()
    target_size = config.target_hidden_size or layer.hidden_size
    if target_size != layer.hidden_size:  # speculators has no drafter narrower than its policy; vLLM has
        drafter.fc = nn.Linear(len(config.eagle_aux_hidden_state_layer_ids) * target_size, layer.hidden_size, bias=False)
    for name, weight in drafter.named_parameters():
        weight.requires_grad_(not name.startswith("verifier_"))
    return drafter


def save(drafter: Eagle3DraftModel, directory: Path, *, tokenizer: Path | None = None) -> None:
    """Write a speculators checkpoint in one move: `vllm serve` and speculators load it as it is. `tokenizer` is the policy's
    tokenizer.json, which lets `preflight` tell another policy with an equally large vocabulary."""
    weights = {name: w.detach().cpu().contiguous() for name, w in drafter.state_dict().items() if not name.startswith("verifier_")}
    _write(directory, _config_text(drafter), weights, tokenizer)


def _config_text(drafter: Eagle3DraftModel) -> str:
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
    (partial / CHECKSUM_FILE).write_text(f"{_sha256(partial / 'model.safetensors')}  model.safetensors\n", encoding="utf-8")
    partial.rename(directory)


def load(directory: Path) -> Eagle3DraftModel:
    """The drafter of a checkpoint, ready for training."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    drafter = _instantiate(Eagle3DraftModel, Eagle3SpeculatorConfig.from_pretrained(directory))
    loaded = drafter.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    missing = [name for name in loaded.missing_keys if not name.startswith("verifier_")]
    if missing or loaded.unexpected_keys:
        raise ValueError(
            f"drafter: {directory} lacks {missing} and has unknown {loaded.unexpected_keys}; must be an EAGLE-3 drafter"
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
    config["eagle_aux_hidden_state_layer_ids"] = list(taps)
    config["speculators_config"]["verifier"] = {"name_or_path": str(policy_path), "architectures": policy["architectures"]}
    _write(target, json.dumps(config, indent=2, sort_keys=True) + "\n", weights, policy_path / "tokenizer.json")


def random_drafter(like: Path, out: Path, *, seed: int) -> None:
    """A drafter of the same cost that knows nothing: what must not make an engine slower."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(like / "model.safetensors")
    for name, weight in weights.items():
        if weight.is_floating_point() and weight.ndim == 2:
            weights[name] = (torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])).to(weight.dtype)
    _write(out, (like / "config.json").read_text(encoding="utf-8"), weights, like / "tokenizer.json")


def preflight(drafter_path: Path, model_path: Path, *, max_model_len: int) -> None:
    """Refuse a drafter that does not belong to this policy, before an engine loads either. vLLM loads most of these without a word
    and accepts nothing afterwards, which looks like a poor drafter."""
    config, layer, shapes = _read_drafter(drafter_path)
    policy = _policy_config(model_path)
    who = f"speculation.drafter.path: {drafter_path}"
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
    target_size = config.get("target_hidden_size") or layer["hidden_size"]
    if target_size != policy["hidden_size"] or shapes["fc.weight"] != (layer["hidden_size"], NUM_TAPS * target_size):
        raise ValueError(
            f"{who} reads {NUM_TAPS} hidden states of {target_size} through fc.weight {shapes['fc.weight']}; must be of "
            f"{policy['hidden_size']} because that is the policy's hidden size: take the drafter of {model_path}"
        )
    num_layers = policy["num_hidden_layers"]
    taps = _taps(config) or [2, num_layers // 2, num_layers - 3]  # the default of vLLM
    if len(set(taps)) != NUM_TAPS or not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"{who} taps layers {taps}; must be {NUM_TAPS} different ones of 0..{num_layers} because that is what the policy has: "
            "set eagle_aux_hidden_state_layer_ids in its config.json to those that it was trained with, or take another drafter"
        )
    own, other = drafter_path / "tokenizer.json", model_path / "tokenizer.json"
    if own.is_file() and other.is_file() and _vocabulary(own) != _vocabulary(other):
        raise ValueError(
            f"{who} was trained with another tokenizer than {other}; must be the same because equal ids would mean different "
            f"text: take the drafter of {model_path}"
        )


def _read_drafter(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, tuple[int, ...]]]:
    """Config, config of its layer, and shapes by name, without loading weights; the checksum is verified where there is one."""
    who = f"speculation.drafter.path: {path}"
    file, weights = path / "config.json", sorted(path.glob("*.safetensors"))
    if not file.is_file() or not weights:
        raise ValueError(
            f"{who} has no config.json or no safetensors; must be a checkpoint directory: `paceline draft train` makes one"
        )
    config = json.loads(file.read_text(encoding="utf-8"))
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"{who} is a {kind!r} drafter; must be 'eagle3' for drafter.kind eagle3: choose another kind or drafter")
    recorded = path / CHECKSUM_FILE
    if recorded.is_file() and recorded.read_text(encoding="utf-8").split()[0] != _sha256(path / "model.safetensors"):
        raise ValueError(f"{who} differs from its checksum; must be whole because a damaged drafter loads silently: copy it again")
    shapes: dict[str, tuple[int, ...]] = {}
    for part in weights:
        try:
            with safe_open(part, "pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{who}: {part.name} cannot be read ({error}); must be whole: copy it again") from None
    if "fc.weight" not in shapes:
        raise ValueError(f"{who} has no fc.weight; must be an EAGLE-3 drafter, which reads several hidden states of the policy")
    return config, config.get("transformer_layer_config", config), shapes


def _taps(config: dict[str, Any]) -> list[int] | None:
    key = "eagle_aux_hidden_state_layer_ids"
    return config.get(key) or (config.get("eagle_config") or {}).get(key)


def _policy_config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config.get("text_config", config)


def _vocabulary(tokenizer: Path) -> Any:
    return json.loads(tokenizer.read_text(encoding="utf-8"))["model"]["vocab"]


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
