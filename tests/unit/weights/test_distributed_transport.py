"""Weights by broadcast, over gloo: what is staged arrives bit by bit, and a member that is gone costs a timeout and no
more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest
import torch

from paceline.devices import finish_work
from paceline.fp8 import KvScales
from paceline.types import PacelineError, PushRefusedError
from paceline.weights import distributed
from paceline.weights.check import TensorSpec, check_push
from paceline.weights.distributed import DistributedReceiver, DistributedSender, GroupAddress
from paceline.weights.fingerprint import fingerprint
from paceline.weights.message import Push

CPU = torch.device("cpu")


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (7, 33), "norm": (5,), "up": (3, 4, 2), "big": (1200, 1000)}
    floats = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return floats | {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "indices": torch.arange(5)}


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {name: TensorSpec(str(x.dtype).removeprefix("torch."), tuple(x.shape)) for name, x in tensors.items()}


@contextmanager
def group(num_workers: int, timeout_s: float = 20.0) -> Iterator[tuple[DistributedSender, list[DistributedReceiver]]]:
    sender, receivers = DistributedSender(CPU), [DistributedReceiver(CPU) for _ in range(num_workers)]
    address = sender.host("127.0.0.1", num_workers, timeout_s)
    together([sender.join, *(lambda r=r, i=i: r.join(address, 1 + i) for i, r in enumerate(receivers))])
    yield sender, receivers
    sender.close()
    for receiver in receivers:
        receiver.close()


def together(calls: list[Callable[[], object]]) -> list[Future]:
    """Each in a thread of its own, as they are in processes of their own in a run."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [threads.submit(call) for call in calls]


def sent(sender: DistributedSender, receivers: list[DistributedReceiver], push: Push) -> list[torch.Tensor]:
    done, *memories = together([sender.transmit, *(lambda r=r: r.fetch(push) for r in receivers)])
    done.result()
    return [memory.result() for memory in memories]


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20, 1 << 40])
def test_what_is_staged_arrives_bit_by_bit_at_every_worker(monkeypatch: pytest.MonkeyPatch, bucket_bytes: int) -> None:
    """However tensors are cut into buckets."""
    monkeypatch.setattr(distributed, "_BUCKET_BYTES", bucket_bytes)
    with group(2) as (sender, receivers):
        for version in (1, 2):
            tensors = weights(version)
            push = sender.stage(version, tensors.items())
            for memory in sent(sender, receivers, push):
                arrived = dict(check_push(push, specs(tensors), memory))
                assert list(arrived) == list(tensors)
                assert all(torch.equal(arrived[name], tensor) for name, tensor in tensors.items())


def test_message_is_the_one_of_shared_memory() -> None:
    """Version, fingerprints, the FP8 reference and KV scales do not depend on how the bytes travel."""
    from paceline.weights.shared_memory import ShmSender

    tensors = weights() | {"model.layers.0.self_attn.o_proj.weight": torch.randn(40, 60).bfloat16()}
    scales = KvScales(version=3, q=(1.0,), k=(0.5,), v=(2.0,))
    shared, sender = ShmSender(), DistributedSender(CPU)
    sender.host("127.0.0.1", 1, 5.0)
    try:
        one = shared.stage(3, tensors.items(), quantized=True, kv_scales=scales)
        two = sender.stage(3, tensors.items(), quantized=True, kv_scales=scales)
    finally:
        shared.close()
        sender.close()
    assert one.fingerprints_of(0) == two.fingerprints_of(0)
    assert (one.version, one.target, one.kv_scales) == (two.version, two.target, two.kv_scales)
    assert two.fingerprints_of(0)["norm"] == fingerprint(tensors["norm"])


def test_tensor_that_changes_after_staging_is_refused_by_name() -> None:
    with group(1) as (sender, receivers):
        tensors = weights()
        push = sender.stage(1, tensors.items())
        tensors["up"][0, 0, 0] += 1
        (memory,) = sent(sender, receivers, push)
        with pytest.raises(PushRefusedError, match=r"^up: fingerprint is "):
            check_push(push, specs(tensors), memory)


def test_weights_are_not_read_before_the_device_is_done_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's kernels run on when `update` returns: a fingerprint or a broadcast that does not wait would read weights
    that are half old, half new."""
    calls: list[str] = []
    broadcast, take = distributed._ProcessGroup.broadcast, distributed.fingerprint

    def sends(group: distributed._ProcessGroup, memory: torch.Tensor) -> None:
        calls.append("broadcast")
        broadcast(group, memory)

    def reads(tensor: torch.Tensor) -> str:
        calls.append("read")
        return take(tensor)

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        calls.append("gather")
        yield "norm", torch.ones(3)

    with group(1) as (sender, (receiver,)):
        monkeypatch.setattr(distributed._ProcessGroup, "broadcast", sends)
        monkeypatch.setattr(distributed, "fingerprint", reads)
        monkeypatch.setattr(distributed, "finish_work", lambda device: calls.append(f"wait for {device}"))
        push = sender.stage(1, gathered())
        assert calls == ["wait for cpu", "gather", "read"]
        calls.clear()
        sent(sender, [receiver], push)
        assert calls[0] == "wait for cpu" and calls.count("broadcast") == 2  # the sender's and the worker's


def test_waiting_for_a_device_synchronizes_gpus_and_only_those(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.synchronize raises where there is no GPU, and nothing else waits for all streams where there is."""
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    finish_work(CPU)
    assert waited == []
    finish_work(torch.device("cuda", 1))
    assert waited == [torch.device("cuda", 1)]


def test_worker_refuses_when_the_sender_does_not_send() -> None:
    """The engine keeps its version and answers, long before its own deadline gives it up."""
    with group(1, timeout_s=1.0) as (sender, (receiver,)):
        push = sender.stage(1, weights().items())
        with pytest.raises(PushRefusedError, match="the bytes did not arrive"):
            receiver.fetch(push)
        with pytest.raises(PushRefusedError, match="has not joined"):
            receiver.fetch(push)


def test_push_of_another_group_is_refused() -> None:
    with group(1) as (_, (receiver,)), group(1) as (other, _):
        push = other.stage(1, weights().items())
        with pytest.raises(PushRefusedError, match="has not joined"):
            receiver.fetch(push)


def _work(pipe: Connection) -> None:
    """A worker in a process of its own: takes one push."""
    pipe.send("started")
    address, rank = pipe.recv()
    receiver = DistributedReceiver(CPU)
    receiver.join(GroupAddress(**address), rank)
    pipe.send("joined")
    tensors = check_push(Push.from_dict(push := pipe.recv()), specs(weights()), receiver.fetch(Push.from_dict(push)))
    pipe.send({name: fingerprint(tensor) for name, tensor in tensors})
    pipe.recv()


def test_worker_process_that_dies_fails_the_broadcast_and_a_new_group_works() -> None:
    """The case of a lost engine: the sender is told, and goes on with those that are left."""
    from dataclasses import asdict

    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    assert ours.recv() == "started"  # importing PyTorch takes longer than a group waits on a busy machine
    sender = DistributedSender(CPU)
    address = sender.host("127.0.0.1", 1, 20.0)
    ours.send((asdict(address), 1))
    sender.join()
    assert ours.recv() == "joined"
    push = sender.stage(1, weights().items())
    ours.send(push.to_dict())
    sender.transmit()
    assert ours.recv() == push.fingerprints_of(0)
    process.kill()
    process.join()
    with pytest.raises(PacelineError, match="the broadcast failed"):
        for version in range(2, 10):  # the first may still fit into the buffers of the connection
            sender.stage(version, weights().items())
            sender.transmit()
    left = DistributedReceiver(CPU)
    address = sender.host("127.0.0.1", 1, 20.0)
    together([sender.join, lambda: left.join(address, 1)])
    push = sender.stage(10, weights().items())
    (memory,) = sent(sender, [left], push)
    assert check_push(push, specs(weights()), memory)
    sender.close()
