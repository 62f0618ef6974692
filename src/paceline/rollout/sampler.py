"""Refuse settings of vLLM's speculation that are not lossless."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keys of speculative_config, in vLLM and its forks, that trade the policy's distribution for acceptance.
_LOSSY_KEYS = (
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
    "posterior_threshold",
    "posterior_alpha",
    "typical_acceptance_sampler_posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha",
)
_LOSSLESS_METHODS = ("standard", "block")  # block verification (Sun et al. 2024) is lossless too


def refuse_lossy(speculative_config: Mapping[str, Any]) -> None:
    """Raise if vLLM's speculative_config changes the policy's distribution."""
    method = speculative_config.get("rejection_sample_method", "standard")
    if method not in _LOSSLESS_METHODS:
        raise ValueError(
            f"speculative_config.rejection_sample_method: got {method!r}; must be one of "
            f"{', '.join(_LOSSLESS_METHODS)} because the policy would be trained on tokens that it did not sample"
        )
    acceptance = speculative_config.get("acceptance_method", "rejection_sampler")
    if acceptance != "rejection_sampler":
        raise ValueError(
            f"speculative_config.acceptance_method: got {acceptance!r}; must be 'rejection_sampler' because lenient "
            "acceptance changes the distribution"
        )
    for key in _LOSSY_KEYS:
        if speculative_config.get(key) is not None:
            raise ValueError(
                f"speculative_config.{key}: got {speculative_config[key]!r}; must be left out because acceptance "
                "independent of the policy's probabilities changes the distribution"
            )
