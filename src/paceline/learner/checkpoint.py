"""Load and write Hugging Face checkpoints of the policy."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers and safetensors are partially typed.

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from paceline.files import atomic_directory, write_checksums
from paceline.weights.check import checkpoint_files, open_files, tensor_names


def load_policy(path: Path) -> tuple[PreTrainedModel, frozenset[str]]:
    """Load the policy in float32 and the names of its checkpoint's tensors. Refuse unsupported architectures."""
    if not checkpoint_files(path):
        raise ValueError(
            f"model_path: got {path}; must be a directory with safetensors because other formats can execute code"
        )
    names = tensor_names(path)
    disable_progress_bar()  # would draw one bar per rank over the console
    policy = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="sdpa", use_safetensors=True
    )
    policy.eval()  # dropout would make log-probabilities random
    missing = sorted({name for name, _ in policy.named_parameters()} - names)
    if missing:
        raise ValueError(
            f"model_path: got {path}, with tensors that transformers renames or merges on loading (such as "
            f"{missing[0]}); must be an architecture with equal names in memory and in the checkpoint because engines "
            "receive the names in memory"
        )
    probe = torch.arange(2)[None]
    with torch.no_grad():
        expected = policy(input_ids=probe, use_cache=False).logits
        scored = output_head(policy)(policy.base_model(input_ids=probe, use_cache=False).last_hidden_state)
    if not torch.allclose(expected, scored, rtol=1e-4, atol=1e-4):
        raise ValueError(
            f"model_path: got {path}, a {type(policy).__name__} with soft-capped or scaled logits; must be a plain "
            "causal model because the learner applies the output head itself, to response tokens only"
        )
    return policy, frozenset(names)


def read_tensors(path: Path, names: frozenset[str], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield these tensors of a checkpoint, with floats converted to `dtype`."""
    for tensors in open_files(path) if names else ():
        for name in sorted(names.intersection(tensors.keys())):
            tensor = tensors.get_tensor(name)
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor


def output_head(policy: PreTrainedModel) -> nn.Module:
    head = policy.get_output_embeddings()
    assert isinstance(head, nn.Module), "causal models have an output head"
    return head


def full_weight(module: nn.Module) -> torch.Tensor:
    """Gather a copy of a module's weight in float32. Collective."""
    assert isinstance(module.weight, torch.Tensor)
    copied = module.weight.detach().to(torch.float32, copy=True)
    return copied.full_tensor() if isinstance(copied, DTensor) else copied


def write_checkpoint(target: Path, source: Path, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Write the weights together with the other files (tokenizer, generation config) of the source checkpoint."""
    with atomic_directory(target, durable=True) as partial:
        for file in source.iterdir():
            if file.is_file() and not file.name.startswith(".") and ".safetensors" not in file.suffixes:
                shutil.copyfile(file, partial / file.name)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # former name of `dtype`
        config["dtype"] = str(dtype).removeprefix("torch.")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        write_checksums(partial)
