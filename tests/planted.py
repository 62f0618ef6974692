"""Parts of an engine that fail on purpose; vLLM loads them by name in its own processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paceline.rollout.proposer import HistoryProposer
from paceline.rollout.scheduler import AdaptiveScheduler

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class _EveryThird:
    """Passes calls of one method on, but raises at every third."""

    def __init__(self, inner: Any, method: str) -> None:
        self._inner, self._method, self._calls = inner, method, 0

    def __getattr__(self, name: str) -> Any:
        return self._call if name == self._method else getattr(self._inner, name)

    def _call(self, *args: Any) -> Any:
        self._calls += 1
        if self._calls % 3 == 0:
            raise RuntimeError("planted")
        return getattr(self._inner, self._method)(*args)


class FailingScheduler(AdaptiveScheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.selector: Any = _EveryThird(self.selector, "choose")


class FailingProposer(HistoryProposer):
    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__(vllm_config)
        self._history: Any = _EveryThird(self._history, "propose")
