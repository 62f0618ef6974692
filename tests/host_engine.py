"""An engine of another host as its rpc shows it, for tests of what trains and pushes there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafter_cases import make_head
from paceline.drafters.checkpoint import load
from paceline.drafters.trainer import evaluate
from paceline.rollout.calls import ServedDrafter
from paceline.types import PushRefusedError
from paceline.weights.check import check_push, inventory
from paceline.weights.message import Push, PushReport
from paceline.weights.shared_memory import ShmReceiver

DRAFT_LENGTH = 3


class HostEngine:
    """An engine as its rpc shows it: takes pushes as a worker does, through JSON, and counts what it verified."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.weights: dict[str, torch.Tensor] = {}
        self.version = 0
        self.accepted = self.verified = 0
        self.num_pushes = 0
        self.forge: dict[str, str] = {}
        self.refuse: str | None = None
        self.problem: str | None = None
        self.ours = True
        """Whether its scheduler is ours."""
        self._receiver = ShmReceiver()

    def generate(self, accepted_length: float) -> None:
        self.verified += 1000
        self.accepted += round(1000 * (accepted_length - 1))

    def restart(self) -> None:
        self.weights, self.version, self.accepted, self.verified = {}, 0, 0, 0

    def rpc(self, method: str, args: Sequence[Any]) -> Sequence[Any]:
        args = json.loads(json.dumps(list(args)))
        match method:
            case "paceline_counters" if self.ours:
                answer = {
                    "selector/verifications": self.verified,
                    "selector/accepted_tokens": self.accepted,
                    "selector/step_s": self.verified / 100,
                    "selector/steps_at_k3": self.verified,
                    "draft/version": self.version,
                }
            case "paceline_push" if self.ours:
                answer = self._receive(Push.from_dict(args[0])).to_dict()
            case "paceline_drafter" if self.ours:
                drafter = ServedDrafter(
                    problem=self.problem, checkpoint=str(self.checkpoint), kind="eagle3", draft_length=DRAFT_LENGTH
                )
                answer = asdict(drafter)
            case _:
                raise NotImplementedError(f"Method {method!r} is not implemented.")
        return json.loads(json.dumps([answer]))

    def _receive(self, push: Push) -> PushReport:
        self.num_pushes += 1
        try:
            if self.refuse is not None:
                raise PushRefusedError(self.refuse)
            found = check_push(push, inventory(self.checkpoint), self._receiver.fetch(push))
        except PushRefusedError as error:
            return PushReport(version=push.version, refused=str(error))
        self.weights = {name: tensor.clone() for name, tensor in found}
        self.version = push.version
        return PushReport(version=push.version, fingerprints=push.fingerprints_of(0) | self.forge)

    def accepted_length(self, documents: Sequence[Any]) -> float:
        """What the drafter in the engine would bring."""
        drafter = load(self.checkpoint)
        drafter.load_state_dict(self.weights, strict=False)
        return evaluate(drafter, documents, make_head(), draft_length=DRAFT_LENGTH).accepted_length[-1]
