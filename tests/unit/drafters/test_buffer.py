"""The buffer between learner and drafter training: bounds, the floor for long documents, the held-out slice, other
processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from drafter_cases import HIDDEN, make_documents, make_drafter, make_head
from paceline.config import BufferConfig
from paceline.drafters import buffer as buffering
from paceline.drafters.buffer import Buffer, Entry, document_bytes, is_heldout, victims
from paceline.drafters.packing import Document
from paceline.drafters.trainer import DrafterTrainer, Schedule

ROOMY = BufferConfig(capacity_mb=64, heldout_share=0.3)


def entry(version: int, num_tokens: int, *, heldout: bool = False, serial: int = 0) -> Entry:
    """One whose size in bytes is its length."""
    file = Path(f"{version:08d}-{serial:020d}")
    return Entry(file=file, version=version, num_tokens=num_tokens, num_bytes=num_tokens, heldout=heldout)


def settings(capacity: int, *, keep_versions: int = 100, heldout_share: float = 0.5) -> BufferConfig:
    """Twice the capacity, of which the held-out slice gets one half."""
    return BufferConfig(
        capacity_mb=2 * capacity / 2**20,
        keep_versions=keep_versions,
        heldout_share=heldout_share,
    )


def assert_equal(one: Document, other: Document) -> None:
    assert one.num_prompt_tokens == other.num_prompt_tokens
    for name in ("token_ids", "taps", "last"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def by_content(documents: list[Document]) -> list[Document]:
    return sorted(documents, key=lambda document: document.token_ids.tobytes())


def test_documents_come_back_bit_for_bit(tmp_path: Path) -> None:
    documents = make_documents([(3, 9), (1, 4), (6, 30), (2, 2), (5, 8), (4, 11)])
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    buffer.put(documents, 4)
    assert {entry.version for entry in buffer.entries()} == {4}
    back = buffer.draw(10_000, np.random.default_rng(0)) + buffer.heldout(10_000)
    assert len(back) == len(documents)
    for one, other in zip(by_content(back), by_content(documents), strict=True):
        assert_equal(one, other)
    num_tokens = [len(document.token_ids) for document in documents]
    assert sum(entry.num_bytes for entry in buffer.entries()) == sum(
        document_bytes(count, 3, HIDDEN) for count in num_tokens
    )


def test_a_document_that_teaches_nothing_takes_no_room(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    buffer.put(make_documents([(3, 1), (3, 0)]), 0)
    assert buffer.entries() == []


def test_bytes_stay_within_the_bound_whatever_comes(tmp_path: Path) -> None:
    config = BufferConfig(capacity_mb=0.1, keep_versions=50, heldout_share=0.2)
    buffer = Buffer(tmp_path, config, writer="rank0")
    rng = np.random.default_rng(0)
    for version in range(12):
        lengths = [(int(rng.integers(1, 5)), int(rng.integers(3, 60))) for _ in range(6)]
        buffer.put(make_documents(lengths, seed=version), version)
        on_disk = sum(file.stat().st_size for file in tmp_path.iterdir())
        assert on_disk == sum(entry.num_bytes for entry in buffer.entries()) <= 0.1 * 2**20
    assert max(entry.version for entry in buffer.entries()) == 11


def test_the_oldest_version_goes_first() -> None:
    entries = [entry(1, 40), entry(2, 30), entry(3, 30), entry(4, 20)]
    assert [gone.version for gone in victims(entries, settings(80))] == [1]
    assert [gone.version for gone in victims(entries, settings(79))] == [1, 2]
    assert victims(entries, settings(120)) == []


def test_short_responses_of_a_new_step_do_not_crowd_out_long_ones_of_earlier_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the floor a drafter is trained on the beginnings of phases, while tails are what everybody waits for."""
    earlier = [entry(1, 10, serial=0), entry(1, 50, serial=1), entry(2, 12, serial=2), entry(2, 30, serial=3)]
    flood = [entry(3, 10, serial=10 + i) for i in range(20)]
    gone = victims([*earlier, *flood], settings(200))
    with monkeypatch.context() as patch:
        patch.setattr(buffering, "LONG_SHARE", 0.0)
        without = victims([*earlier, *flood], settings(200))
    assert set(earlier) <= set(without)
    assert entry(1, 50, serial=1) not in gone, "the longest is older than all that was kept without the floor"
    kept = [one for one in [*earlier, *flood] if one not in gone]
    assert sum(one.num_bytes for one in kept) <= 200 and sum(one.version == 3 for one in kept) == 15


def test_what_is_long_does_not_stay_for_ever() -> None:
    """A floor without an age would keep what the first policies said, which training would then unlearn all else
    for."""
    entries = [entry(1, 90), entry(5, 10), entry(8, 10)]
    assert victims(entries, settings(20, keep_versions=4)) == [entries[0]], "and its room is room for the others"
    assert victims(entries, settings(1000, keep_versions=8)) == []


def test_training_documents_do_not_push_out_the_heldout_slice() -> None:
    entries = [entry(1, 40, heldout=True), *(entry(2, 50, serial=i) for i in range(9))]
    gone = victims(entries, settings(100))
    assert entries[0] not in gone and len(gone) == 7


def test_no_prompt_is_both_trained_on_and_held_out(tmp_path: Path) -> None:
    """Split by document, a sibling of every held-out rollout would be trained on, and the drafter would look better
    than it is."""
    prompts = make_documents([(5, 0)] * 30, seed=1)
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    for version in range(3):
        for sibling in range(4):
            documents = [
                Document(
                    token_ids=np.concatenate([prompt.token_ids, response.token_ids]),
                    num_prompt_tokens=5,
                    taps=np.concatenate([prompt.taps, response.taps]),
                    last=np.concatenate([prompt.last, response.last]),
                )
                for prompt, response in zip(
                    prompts, make_documents([(0, 6)] * 30, seed=10 * version + sibling), strict=True
                )
            ]
            Buffer(tmp_path, ROOMY, writer=f"rank{sibling}").put(documents, version)
    trained = {tuple(document.token_ids[:5]) for document in buffer.draw(100_000, np.random.default_rng(0))}
    heldout = {tuple(document.token_ids[:5]) for document in buffer.heldout(100_000)}
    assert trained and heldout and not trained & heldout
    assert len(trained | heldout) == 30
    assert heldout == {tuple(prompt.token_ids) for prompt in prompts if is_heldout(prompt, 0.3)}


def test_the_heldout_slice_is_of_the_newest_policy(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, BufferConfig(capacity_mb=64, heldout_share=0.99), writer="rank0")
    for version in range(4):
        buffer.put(make_documents([(2, 10)] * 3, seed=version), version)
    newest = {document.token_ids.tobytes() for document in make_documents([(2, 10)] * 3, seed=3)}
    assert {document.token_ids.tobytes() for document in buffer.heldout(30)} == newest


def test_drawing_takes_each_document_once_and_about_as_many_tokens_as_asked(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, BufferConfig(capacity_mb=64, heldout_share=0.01), writer="rank0")
    buffer.put(make_documents([(4, 16)] * 30), 0)
    drawn = buffer.draw(100, np.random.default_rng(1))
    assert sum(len(document.token_ids) for document in drawn) == 100
    assert len({document.token_ids.tobytes() for document in drawn}) == len(drawn)
    other = buffer.draw(100, np.random.default_rng(2))
    assert {d.token_ids.tobytes() for d in drawn} != {d.token_ids.tobytes() for d in other}


def test_a_reader_maps_the_file_and_keeps_it_when_room_is_made(tmp_path: Path) -> None:
    """A trainer in the middle of a document must not lose it to a writer, nor hold a copy of the whole buffer."""
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    (document,) = make_documents([(3, 40)], seed=2)
    buffer.put([document], 0)
    (mapped,) = buffer.draw(1, np.random.default_rng(0)) or buffer.heldout(1)
    base = mapped.taps
    while base.base is not None and not isinstance(base, np.memmap):
        base = base.base
    assert isinstance(base, np.memmap) and not mapped.taps.flags.writeable
    buffer.put(make_documents([(3, 4)]), 100)
    assert [entry.version for entry in buffer.entries()] == [100]
    assert_equal(mapped, document)


def test_another_process_reads_what_was_put(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    buffer.put(make_documents([(3, 9), (2, 12), (4, 20)]), 7)
    buffer.put_head(make_head().numpy(), 7)
    program = (
        "import hashlib, sys\nfrom pathlib import Path\nimport numpy as np\n"
        "from paceline.config import BufferConfig\nfrom paceline.drafters.buffer import Buffer\n"
        "buffer = Buffer(Path(sys.argv[1]), BufferConfig(heldout_share=0.3))\n"
        "documents = buffer.draw(1000, np.random.default_rng(0)) + buffer.heldout(1000)\n"
        "version, head = buffer.head()\n"
        "parts = sorted(d.token_ids.tobytes() + d.taps.tobytes() + d.last.tobytes() for d in documents)\n"
        "print(version, hashlib.sha256(b''.join(parts) + head.tobytes()).hexdigest())\n"
    )
    answer = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=True)
    parts = sorted(
        d.token_ids.tobytes() + d.taps.tobytes() + d.last.tobytes() for d in make_documents([(3, 9), (2, 12), (4, 20)])
    )
    assert answer.stdout.split() == ["7", hashlib.sha256(b"".join(parts) + make_head().numpy().tobytes()).hexdigest()]


def test_only_the_owner_can_read_rollouts(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path / "documents", ROOMY, writer="rank0")
    buffer.put(make_documents([(3, 9)]), 1)
    (entry,) = buffer.entries()
    assert entry.file.stat().st_mode & 0o777 == 0o600
    assert entry.file.parent.stat().st_mode & 0o777 == 0o700


def test_a_writer_that_died_leaves_nothing_that_is_read_or_kept(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    buffer.put(make_documents([(3, 9)]), 1)
    (whole,) = (entry.file for entry in buffer.entries())
    half = whole.with_name("." + whole.name.replace("00000001-", "00000002-") + ".0123abcd.partial")
    half.write_bytes(whole.read_bytes()[:100])
    assert len(buffer.entries()) == 1
    Buffer(tmp_path, ROOMY, writer="rank1")
    Buffer(tmp_path, ROOMY)
    assert half.exists(), "a reader or another writer must not take it from one that is in the middle of it"
    Buffer(tmp_path, ROOMY, writer="rank0")
    assert not half.exists() and whole.exists()


@pytest.mark.parametrize("damage", ["cut", "foreign", "empty"])
def test_a_damaged_file_is_skipped_and_counted(tmp_path: Path, damage: str) -> None:
    buffer = Buffer(tmp_path, BufferConfig(heldout_share=0.01), writer="rank0")
    buffer.put(make_documents([(3, 9), (3, 10)]), 1)
    first, second = buffer.entries()
    content = first.file.read_bytes()
    first.file.write_bytes({"cut": content[:-8], "foreign": b"\0" * len(content), "empty": b""}[damage])
    documents = buffer.draw(10_000, np.random.default_rng(0))
    assert [len(document.token_ids) for document in documents] == [second.num_tokens]
    assert buffer.num_broken == 1


def test_only_the_newest_head_stays(tmp_path: Path) -> None:
    buffer = Buffer(tmp_path, ROOMY, writer="rank0")
    assert buffer.head() is None
    for version in (3, 4):
        buffer.put_head(make_head(version).numpy(), version)
    found = buffer.head()
    assert found is not None and found[0] == 4
    np.testing.assert_array_equal(found[1], make_head(4).numpy())
    assert len(list(tmp_path.iterdir())) == 1


def test_the_trainer_takes_what_the_buffer_maps(tmp_path: Path) -> None:
    """Training from mapped, read-only arrays ends at the same parameters as from the documents themselves."""
    config = BufferConfig(heldout_share=0.01)
    documents = make_documents([(3, 9), (2, 13), (4, 7)])
    buffer = Buffer(tmp_path, config, writer="rank0")
    buffer.put(documents, 0)
    mapped = by_content(buffer.draw(10_000, np.random.default_rng(0)))
    results = []
    for source in (by_content(documents), mapped):
        trainer = DrafterTrainer(make_drafter(), make_head(), Schedule(num_steps=None, warmup_steps=1, autocast=False))
        trainer.submit(source)
        assert trainer.run(lambda: False) and trainer.num_steps == 1
        results.append(trainer.drafter.fc.weight.detach().numpy())
    np.testing.assert_array_equal(*results)
