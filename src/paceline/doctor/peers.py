"""A push between two processes that meet as learner and engine do: over gloo, or over NCCL between two GPUs."""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch

from paceline.devices import use_device
from paceline.types import DeviceKind, PacelineError
from paceline.weights.check import TensorSpec, check_push
from paceline.weights.distributed import DistributedReceiver, DistributedSender
from paceline.weights.message import Push

_NUM_FLOATS = 4 * 2**20
_MEET_S = 60.0
_START_S = 300.0
"""A new process imports torch first, which takes long on a busy machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broadcast:
    """One push that arrived with the fingerprint that it was sent with."""

    num_bytes: int
    seconds: float


def broadcast(kind: DeviceKind) -> Broadcast:
    """Push a tensor from this process to a new one on this kind of device; raises PacelineError if it does not
    arrive."""
    spawn = multiprocessing.get_context("spawn")
    peer, theirs = spawn.Pipe()
    process = spawn.Process(target=_receive, args=(kind, theirs), daemon=True)
    process.start()
    theirs.close()
    sender = DistributedSender(use_device(0, kind))
    try:
        _answer(peer, "start", _START_S)
        peer.send(sender.host("127.0.0.1", 1, _MEET_S))
        sender.join()
        push = sender.stage(1, [("probe", torch.randn(_NUM_FLOATS))])
        began_s = time.monotonic()
        peer.send(push.to_dict())
        sender.transmit()
        _answer(peer, "receive a tensor", _MEET_S)
        return Broadcast(num_bytes=push.num_bytes, seconds=time.monotonic() - began_s)
    finally:
        sender.close()
        process.kill()
        process.join()


def _answer(peer: Connection, what: str, deadline_s: float) -> None:
    if not peer.poll(deadline_s):
        raise PacelineError(f"another process did not {what} within {deadline_s:.0f} s")
    try:
        problem = peer.recv()
    except EOFError:
        raise PacelineError(f"another process ended before it could {what}") from None
    if problem is not None:
        raise PacelineError(problem)


def _receive(kind: DeviceKind, peer: Connection) -> None:
    peer.send(None)
    try:
        receiver = DistributedReceiver(use_device(1, kind))
        receiver.join(peer.recv(), 1)
        push = Push.from_dict(peer.recv())
        check_push(push, {"probe": TensorSpec("float32", (_NUM_FLOATS,))}, receiver.fetch(push))
    except Exception as error:  # noqa: BLE001  told to the process that asked, which raises it
        peer.send(f"{type(error).__name__}: {error}")
    else:
        peer.send(None)
