"""The weight wire without an engine: staging, checking, refusing, and who cleans up after whom."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.files import sweep_segments
from paceline.fp8 import KvScales, Sharding, quantize_blocks
from paceline.types import PushRefusedError
from paceline.weights.check import TensorSpec, check_precision, check_push, inventory
from paceline.weights.deliver import deliver
from paceline.weights.fingerprint import device_fingerprint, fingerprint, mismatched
from paceline.weights.message import Push, PushReport
from paceline.weights.shared_memory import ShmReceiver, ShmSender

SHM = Path("/dev/shm")


def weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"embed": (7, 33), "norm": (5,), "up": (3, 4, 2), "big": (1200, 1000)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def specs(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSpec]:
    return {
        name: TensorSpec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    }


def received(
    push: Push, expected: dict[str, TensorSpec], receiver: ShmReceiver | None = None
) -> list[tuple[str, torch.Tensor]]:
    return check_push(push, expected, (receiver or ShmReceiver()).fetch(push))


def change_byte(push: Push, name: str, *, at: int = 0) -> None:
    """Flip one bit of a staged tensor, behind the sender's back."""
    entry = next(entry for entry in push.entries if entry.name == name)
    with (SHM / push.channel).open("r+b") as file:
        file.seek(entry.offset + at)
        byte = file.read(1)[0]
        file.seek(entry.offset + at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def sender() -> Iterator[ShmSender]:
    sender = ShmSender()
    yield sender
    sender.close()


def test_what_is_staged_arrives_bit_by_bit(sender: ShmSender) -> None:
    sent = weights() | {"scalar": torch.tensor(3.5), "none": torch.empty(0, 4), "indices": torch.arange(5)}
    arrived = dict(received(sender.stage(1, sent.items()), specs(sent)))
    assert list(arrived) == list(sent)
    for name, tensor in sent.items():
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor), name


def test_a_transposed_tensor_arrives_in_its_logical_order(sender: ShmSender) -> None:
    """Copying its memory as it lies would send the untransposed values under the transposed shape."""
    sent = {"w": torch.arange(6.0).reshape(2, 3).T}
    assert torch.equal(dict(received(sender.stage(1, sent.items()), specs(sent)))["w"], sent["w"])


def test_push_survives_json(sender: ShmSender) -> None:
    """vLLM's rpc turns tuples into lists; a shape that came back as a list would be refused as misshapen."""
    push = sender.stage(7, weights().items())
    assert Push.from_dict(json.loads(json.dumps(push.to_dict()))) == push


def test_report_survives_json() -> None:
    report = PushReport(version=3, fingerprints={"w": "ab"}, verify_s=0.5, load_s=0.25)
    assert PushReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


def test_second_push_reuses_the_segment_and_its_offsets(sender: ShmSender) -> None:
    """A new segment at every push would cost its page faults again, and its memory for ever."""
    first, second = sender.stage(1, weights(1).items()), sender.stage(2, weights(2).items())
    assert second.channel == first.channel
    assert [entry.offset for entry in second.entries] == [entry.offset for entry in first.entries]
    assert all(a.fingerprint != b.fingerprint for a, b in zip(first.entries, second.entries, strict=True))


def test_receiver_follows_a_segment_that_grew(sender: ShmSender) -> None:
    """The mapping is kept between pushes; past its old end there is nothing to read."""
    small, large = weights(), weights() | {"huge": torch.randn(3_000_000), "huger": torch.randn(5_000_000)}
    receiver = ShmReceiver()
    received(sender.stage(1, small.items()), specs(small), receiver)
    arrived = dict(received(sender.stage(2, large.items()), specs(large), receiver))
    assert torch.equal(arrived["huger"], large["huger"])


def test_targets_have_segments_of_their_own(sender: ShmSender) -> None:
    """A drafter's push must not overwrite a policy's that is still being read."""
    policy, drafter = weights(1), weights(2)
    policy_push, drafter_push = sender.stage(1, policy.items()), sender.stage(1, drafter.items(), target="drafter")
    assert policy_push.channel != drafter_push.channel
    assert torch.equal(dict(received(policy_push, specs(policy)))["big"], policy["big"])


def refusal(push: Push, expected: dict[str, TensorSpec], receiver: ShmReceiver | None = None) -> str:
    with pytest.raises(PushRefusedError) as caught:
        received(push, expected, receiver)
    return str(caught.value)


@pytest.mark.parametrize("name", ["embed", "norm", "big"])
def test_flipped_bit_is_refused_by_name(sender: ShmSender, name: str) -> None:
    push = sender.stage(1, weights().items())
    change_byte(push, name, at=next(entry.num_bytes for entry in push.entries if entry.name == name) - 1)
    assert refusal(push, specs(weights())).startswith(f"{name}: fingerprint is ")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_value_that_is_not_finite_is_refused_by_name(sender: ShmSender, dtype: torch.dtype, value: float) -> None:
    sent = weights(dtype=dtype)
    sent["big"][-1, -1] = value  # in the last, shorter block
    assert refusal(sender.stage(1, sent.items()), specs(sent)) == "big: holds a NaN or an infinity"


def test_largest_finite_values_are_not_refused(sender: ShmSender) -> None:
    """The bit pattern of the check is one below the first infinity; one off would refuse honest weights."""
    kinds = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)
    limits = {kind: torch.tensor([torch.finfo(kind).max, torch.finfo(kind).min], dtype=torch.float64) for kind in kinds}
    sent = {str(kind): values.to(kind) for kind, values in limits.items()} | {"all ones": torch.tensor([-1, 2**62])}
    assert len(received(sender.stage(1, sent.items()), specs(sent))) == 7


def test_fast_finite_check_agrees_with_torch(sender: ShmSender) -> None:
    """Every 16-bit pattern, against the readable twin."""
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16)
    for dtype in (torch.bfloat16, torch.float16):
        sent = {str(i): value for i, value in enumerate(patterns.view(dtype).split(128))}
        push, receiver = sender.stage(1, sent.items()), ShmReceiver()
        for entry in push.entries:
            one, expected = replace(push, entries=(entry,)), {entry.name: specs(sent)[entry.name]}
            if bool(torch.isfinite(sent[entry.name]).all()):
                received(one, expected, receiver)
            else:
                assert "NaN" in refusal(one, expected, receiver)


def test_missing_tensor_is_refused_by_name(sender: ShmSender) -> None:
    sent = weights()
    del sent["norm"]
    assert refusal(sender.stage(1, sent.items()), specs(weights())) == "norm: missing from the push"


def test_unknown_tensor_is_refused_by_name(sender: ShmSender) -> None:
    sent = weights() | {"lm_head": torch.zeros(2)}
    assert refusal(sender.stage(1, sent.items()), specs(weights())).startswith("lm_head: unknown")


def test_misshapen_tensor_is_refused_by_name(sender: ShmSender) -> None:
    sent = weights()
    sent["embed"] = sent["embed"].reshape(33, 7)
    assert refusal(sender.stage(1, sent.items()), specs(weights())) == "embed: got shape [33, 7]; must be [7, 33]"


def test_tensor_sent_twice_is_refused(sender: ShmSender) -> None:
    """The second would be loaded over the first, and the report would show only one of them."""
    push = sender.stage(1, weights().items())
    assert refusal(replace(push, entries=(*push.entries, push.entries[0])), specs(weights())) == "embed: sent twice"


def test_indices_sent_as_floats_are_refused(sender: ShmSender) -> None:
    expected = {"d2t": TensorSpec("int64", (3,))}
    push = sender.stage(1, [("d2t", torch.tensor([1.0, 2.0, 3.0]))])
    assert refusal(push, expected) == "d2t: got dtype float32; must be int64"


def test_other_float_type_than_the_checkpoint_passes(sender: ShmSender) -> None:
    """A float32 learner may feed an engine that was started from a bfloat16 checkpoint; the engine converts."""
    sent = weights(dtype=torch.float32)
    assert len(received(sender.stage(1, sent.items()), specs(weights()))) == 4


def test_entry_that_points_outside_is_refused(sender: ShmSender) -> None:
    """Reading past the end of a mapped file kills the process with SIGBUS."""
    push = sender.stage(1, weights().items())
    outside = replace(push.entries[0], offset=1 << 40)
    assert "must be at least" in refusal(replace(push, entries=(outside, *push.entries[1:])), specs(weights()))


@pytest.mark.parametrize("segment", ["../../etc/passwd", "paceline-/../x", "other", "paceline-gone"])
def test_segment_that_is_not_ours_is_refused(sender: ShmSender, segment: str) -> None:
    push = sender.stage(1, weights().items())
    assert segment in refusal(replace(push, channel=segment), specs(weights()))


def test_quantized_push_names_what_an_fp8_engine_must_hold(sender: ShmSender) -> None:
    """Fingerprints of the reference come with the push; those of the BF16 bytes stay as they are."""
    layer = {
        "model.layers.0.self_attn.o_proj.weight": torch.randn(40, 60).bfloat16(),
        "model.norm.weight": torch.ones(60),
    }
    plain, push = sender.stage(1, layer.items()), sender.stage(1, layer.items(), quantized=True)
    reference = quantize_blocks(layer["model.layers.0.self_attn.o_proj.weight"])
    assert push.entries == plain.entries
    (quantized,) = push.quantized
    assert quantized == {
        "model.layers.0.self_attn.o_proj.weight.fp8": fingerprint(reference.codes_NK),
        "model.layers.0.self_attn.o_proj.weight.scale": fingerprint(reference.scale),
    }
    assert set(push.fingerprints_of(0)) == set(layer) | set(quantized)


def test_scales_are_part_of_what_must_be_held_and_survive_json(sender: ShmSender) -> None:
    scales = KvScales(version=1, q=(0.5,), k=(0.1,), v=(2.0,))
    push = sender.stage(1, weights().items(), kv_scales=scales)
    assert {name for name in push.fingerprints_of(0) if name.startswith("kv_scales")} == set(scales.named())
    assert Push.from_dict(json.loads(json.dumps(push.to_dict()))) == push


@pytest.mark.parametrize(
    ("fp8_weights", "num_kv_scales", "why"),
    [
        (False, 0, "weights: staged for an engine in FP8"),
        (True, 0, "kv_scales: got 2; must be 0"),
        (True, 3, "kv_scales: got 2; must be 3"),
        (True, 2, "kv_scales: calibrated for version 4; must be of version 5"),
    ],
)
def test_push_for_another_precision_or_with_old_scales_is_refused(
    fp8_weights: bool, num_kv_scales: int, why: str
) -> None:
    scales = KvScales(version=4, q=(1.0, 1.0), k=(1.0, 1.0), v=(1.0, 1.0))
    push = Push(
        version=5,
        target="policy",
        transport="shared_memory",
        channel="",
        entries=(),
        quantized=({"a": "b"},),
        kv_scales=scales,
    )
    with pytest.raises(PushRefusedError, match=why):
        check_precision(push, fp8_weights=fp8_weights, num_workers=1, num_kv_scales=num_kv_scales)
    check_precision(replace(push, version=4), fp8_weights=True, num_workers=1, num_kv_scales=2)
    with pytest.raises(PushRefusedError, match="staged in FP8 for 1 tensor-parallel workers; must be for 2"):
        check_precision(replace(push, version=4), fp8_weights=True, num_workers=2, num_kv_scales=2)


def test_misuse_of_stage_is_told(sender: ShmSender) -> None:
    with pytest.raises(ValueError, match="version: got -1"):
        sender.stage(-1, weights().items())
    with pytest.raises(ValueError, match="weights: got no tensor"):
        sender.stage(1, [])


@pytest.mark.parametrize("take", [fingerprint, device_fingerprint])
def test_fingerprint_sees_every_kind_of_change(take: Any) -> None:
    tensor = torch.arange(1000, dtype=torch.float32)
    flipped = tensor.clone()
    flipped.view(torch.int32)[500] ^= 1
    exchanged = tensor.clone()
    exchanged[[3, 4]] = exchanged[[4, 3]]
    same_bytes = (tensor.reshape(10, 100), tensor.view(torch.int32))
    prints = [
        take(x) for x in (tensor, flipped, exchanged, *same_bytes, tensor[:-1], torch.cat([tensor, torch.zeros(1)]))
    ]
    assert len(set(prints)) == len(prints)
    assert take(tensor.clone()) == prints[0]


def test_fingerprint_on_the_way_is_the_fingerprint(sender: ShmSender) -> None:
    """Staging hashes block by block; the twin hashes the tensor at once."""
    sent = weights()
    staged = sender.stage(1, sent.items())
    assert staged.fingerprints_of(0) == {name: fingerprint(tensor) for name, tensor in sent.items()}


def test_mismatch_names_what_differs_is_absent_or_came_from_nowhere() -> None:
    assert mismatched({"a": "1", "b": "2", "c": "3"}, {"a": "1", "b": "9", "d": "4"}) == ("b", "c", "d")
    assert mismatched({"a": "1"}, {"a": "1"}) == ()


def test_inventory_reads_every_shard_of_the_index_and_no_other_file(tmp_path: Path) -> None:
    """Some repositories hold the weights a second time under other names."""
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2, 3, dtype=torch.bfloat16)}, tmp_path / "model-1.safetensors")
    save_file({"b": torch.zeros(4, dtype=torch.int64)}, tmp_path / "model-2.safetensors")
    save_file({"c": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert inventory(tmp_path) == {"a": TensorSpec("bfloat16", (2, 3)), "b": TensorSpec("int64", (4,))}


def test_inventory_of_a_directory_without_weights_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory"):
        inventory(tmp_path)


def test_segment_is_private_and_goes_with_its_sender() -> None:
    sender = ShmSender()
    path = SHM / sender.stage(1, weights().items()).channel
    assert path.stat().st_mode & 0o777 == 0o600
    sender.close()
    assert not path.exists()


OWNER = """
import sys, torch
from paceline.weights.shared_memory import ShmSender
sender = ShmSender()
print(sender.stage(1, [("w", torch.zeros(8))]).channel, flush=True)
sys.stdin.read()
"""


def start_owner() -> tuple[subprocess.Popen[str], Path]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    return owner, SHM / owner.stdout.readline().strip()


def test_sweep_removes_a_killed_owners_segment_and_no_living_ones(sender: ShmSender) -> None:
    """Without it every crash would keep the weights in memory until the machine restarts."""
    own = SHM / sender.stage(1, weights().items()).channel
    owner, theirs = start_owner()
    assert theirs.name not in sweep_segments()
    assert theirs.exists()
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    assert theirs.exists()
    assert theirs.name in sweep_segments()
    assert not theirs.exists()
    assert own.exists()


def test_sweep_survives_what_others_have_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner that did not start because of somebody's directory in shared memory could be stopped by anybody."""
    monkeypatch.setattr("paceline.files.SHARED_MEMORY", tmp_path)
    precious = tmp_path / "precious"
    precious.touch()
    (tmp_path / "paceline-0").mkdir()
    (tmp_path / "paceline-link").symlink_to(precious)
    (tmp_path / "paceline-nowhere").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "paceline-pipe")
    assert sweep_segments() == []
    theirs = tmp_path / "paceline-1-policy-theirs"
    theirs.touch()
    uid = os.getuid()
    with monkeypatch.context() as patched:
        patched.setattr("os.getuid", lambda: uid + 1)
        assert sweep_segments() == []
    assert sweep_segments() == [theirs.name]
    assert precious.exists() and (tmp_path / "paceline-0").exists()


def test_owner_that_ends_without_closing_leaves_nothing() -> None:
    owner, path = start_owner()
    owner.communicate("")
    assert not path.exists()


def test_forked_child_does_not_take_the_segment_along(sender: ShmSender) -> None:
    path = SHM / sender.stage(1, weights().items()).channel
    pid = os.fork()
    if pid == 0:
        sender.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert path.exists()


class FakeEngine:
    """Behaves like an engine with `num_workers` workers: real checks, a dict for a model."""

    def __init__(self, expected: dict[str, TensorSpec], num_workers: int = 1) -> None:
        self.name = "engine-0"
        self.policy_version = 0
        self.running = True
        self.model: dict[str, torch.Tensor] = {}
        self.expected = [expected] * num_workers
        self.die: Exception | None = None
        self.forge: dict[str, str] = {}

    async def pause(self) -> None:
        self.running = False

    async def resume(self) -> None:
        self.running = True

    async def on_new_weights(self, version: int) -> None:
        assert not self.running, "caches must go before the next step"
        self.policy_version = version

    async def rpc(self, method: str, *args: Any) -> list[Any]:
        assert method == "receive_push"
        assert not self.running, "weights must not change during a step"
        if self.die is not None:
            raise self.die
        return [self._receive(args[0], expected, rank) for rank, expected in enumerate(self.expected)]

    def _receive(self, plain: dict[str, Any], expected: dict[str, TensorSpec], rank: int) -> dict[str, Any]:
        push = Push.from_dict(json.loads(json.dumps(plain)))
        try:
            self.model = {name: tensor.clone() for name, tensor in received(push, expected)}
        except PushRefusedError as error:
            return PushReport(version=push.version, refused=str(error), fingerprints={}).to_dict()
        return PushReport(version=push.version, fingerprints=push.fingerprints_of(rank) | self.forge).to_dict()


def test_delivered_push_makes_the_new_version_and_resumes(sender: ShmSender) -> None:
    sent = weights()
    engine = FakeEngine(specs(sent))
    receipt = asyncio.run(deliver(engine, sender.stage(5, sent.items())))
    assert receipt.ok
    assert (receipt.engine, receipt.version, receipt.num_tensors) == ("engine-0", 5, 4)
    assert receipt.num_bytes == 2 * sum(tensor.numel() for tensor in sent.values())
    assert (engine.policy_version, engine.running) == (5, True)
    assert torch.equal(engine.model["big"], sent["big"])


def test_refused_push_leaves_the_old_version_running(sender: ShmSender) -> None:
    engine = FakeEngine(specs(weights()), num_workers=2)
    push = sender.stage(5, weights().items())
    change_byte(push, "up")
    receipt = asyncio.run(deliver(engine, push))
    assert receipt.error is not None
    assert receipt.error.startswith("up: fingerprint")
    assert (receipt.ok, receipt.lost, engine.policy_version, engine.running) == (False, False, 0, True)


def test_engine_that_fails_during_a_push_is_lost_and_stays_paused(sender: ShmSender) -> None:
    """It may hold half of the new policy: resuming it would sample from neither version."""
    engine = FakeEngine(specs(weights()))
    engine.die = RuntimeError("worker ran out of memory")
    receipt = asyncio.run(deliver(engine, sender.stage(5, weights().items())))
    assert (receipt.lost, receipt.error) == (True, "RuntimeError: worker ran out of memory")
    assert (engine.policy_version, engine.running) == (0, False)


def test_engine_whose_workers_disagree_is_lost(sender: ShmSender) -> None:
    """Tensor-parallel workers of two versions answer with nonsense."""
    engine = FakeEngine(specs(weights()), num_workers=2)
    engine.expected[1] = {**engine.expected[1], "extra": TensorSpec("float32", (1,))}
    receipt = asyncio.run(deliver(engine, sender.stage(5, weights().items())))
    assert receipt.lost
    assert not engine.running


def test_worker_that_holds_the_shard_of_another_is_found(sender: ShmSender) -> None:
    """Compared with the reference of the first worker, every other worker's sound shard would be called wrong, and a
    copy of the first one's right."""
    layer = {"model.layers.0.self_attn.o_proj.weight": torch.randn(40, 60).bfloat16()}
    push = sender.stage(5, layer.items(), quantized=True, sharding=Sharding(num_workers=2))
    assert len(push.quantized) == 2
    engine = FakeEngine(specs(layer), num_workers=2)
    assert asyncio.run(deliver(engine, push)).ok
    engine.forge = dict(push.quantized[0])
    receipt = asyncio.run(deliver(engine, push))
    assert (receipt.lost, receipt.mismatched) == (True, tuple(sorted(push.quantized[1])))


def test_engine_that_reports_other_fingerprints_is_lost(sender: ShmSender) -> None:
    engine = FakeEngine(specs(weights()))
    engine.forge = {"norm": "0" * 32}
    receipt = asyncio.run(deliver(engine, sender.stage(5, weights().items())))
    assert (receipt.mismatched, receipt.lost, engine.policy_version) == (("norm",), True, 0)


def test_drafter_push_leaves_the_policy_version_alone(sender: ShmSender) -> None:
    engine = FakeEngine(specs(weights()))
    assert asyncio.run(deliver(engine, sender.stage(9, weights().items(), target="drafter"))).ok
    assert engine.policy_version == 0
