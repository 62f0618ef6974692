"""Two processes that meet as learner and engine do, and a push from one to the other: over gloo, or NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from paceline.devices import use_device
from paceline.types import DeviceKind, PacelineError
from paceline.weights.check import TensorSpec, check_push
from paceline.weights.distributed import DistributedReceiver, DistributedSender, GroupAddress
from paceline.weights.message import Push

_NUM_FLOATS = 4 * 2**20
_MEET_S = 30.0
_DEADLINE_S = 120.0
"""Starting two interpreters that import torch is most of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """One push that arrived with the fingerprint that it was sent with."""

    num_bytes: int
    seconds: float


def broadcast(kind: DeviceKind) -> Broadcast:
    """Push a tensor between two new processes on this kind of device; raises PacelineError with what either says."""
    spawn = multiprocessing.get_context("spawn")
    first, second = spawn.Pipe()
    answers: list[Connection] = []
    processes = []
    for target, peer in ((_send, first), (_receive, second)):
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=_guarded, args=(target, kind, peer, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        answers.append(ours)
    try:
        return Broadcast(num_bytes=4 * _NUM_FLOATS, seconds=_collect(answers))
    finally:
        for process in processes:
            process.kill()
            process.join()


def _collect(answers: list[Connection]) -> float:
    """Wait for both answers; returns how long the sender took."""
    until_s = time.monotonic() + _DEADLINE_S
    waiting, took_s = list(answers), 0.0
    while waiting:
        ready = wait(waiting, timeout=max(0.0, until_s - time.monotonic()))
        if not ready:
            raise PacelineError(f"two processes did not exchange a tensor within {_DEADLINE_S:.0f} s")
        for end in [end for end in waiting if end in ready]:
            waiting.remove(end)
            try:
                answer = end.recv()
            except EOFError:
                answer = "a process ended without an answer"
            if isinstance(answer, str):
                raise PacelineError(answer)
            took_s = max(took_s, answer)
    return took_s


def _guarded(target: Any, kind: DeviceKind, peer: Connection, answer: Connection) -> None:
    try:
        answer.send(target(kind, peer))
    except Exception as error:  # noqa: BLE001  told to the process that asked, which raises it
        answer.send(f"{type(error).__name__}: {error}")


def _send(kind: DeviceKind, peer: Connection) -> float:
    sender = DistributedSender(use_device(0, kind))
    peer.send(sender.host("127.0.0.1", 1, _MEET_S))
    sender.join()
    push = sender.stage(1, [("probe", torch.randn(_NUM_FLOATS))])
    peer.send(push.to_dict())
    began_s = time.monotonic()
    sender.transmit()
    peer.recv()  # the store lives here, and must until the other has what it needs
    return time.monotonic() - began_s


def _receive(kind: DeviceKind, peer: Connection) -> float:
    receiver = DistributedReceiver(use_device(1, kind))
    address: GroupAddress = peer.recv()
    receiver.join(address, 1)
    push = Push.from_dict(peer.recv())
    check_push(push, {"probe": TensorSpec("float32", (_NUM_FLOATS,))}, receiver.fetch(push))
    peer.send(None)
    return 0.0
