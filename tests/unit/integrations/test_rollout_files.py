"""Rollouts that another program writes: every line is read once, and none that is broken or half written does harm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from letters import Letters
from paceline.integrations import rollout_files
from paceline.integrations.rollout_files import RolloutFiles, RolloutReader
from paceline.types import Sample


def line(number: int) -> str:
    return json.dumps({"prompt_ids": [1, number], "response_ids": [3, 4]}) + "\n"


def numbers(samples: list[Sample]) -> list[int]:
    return [int(sample.token_ids[1]) for sample in samples]


def never() -> Letters:
    raise AssertionError("token ids need no tokenizer")


@pytest.fixture
def reader() -> RolloutReader:
    return RolloutReader(never, vocabulary=100, longest=8)


def texts() -> RolloutReader:
    return RolloutReader(lambda: Letters(begin="^"), vocabulary=200, longest=50)


def test_lines_are_read_once_wherever_the_file_goes(tmp_path: Path, reader: RolloutReader) -> None:
    """A host that rotates its log would otherwise have every rollout trained on twice."""
    files = RolloutFiles(tmp_path)
    log = tmp_path / "now.jsonl"
    log.write_text(line(1) + line(2))
    (tmp_path / "notes.txt").write_text("not a rollout\n")
    (tmp_path / "other.jsonl.tmp").write_text(line(8))
    assert numbers(files.take(reader)) == [1, 2]
    with log.open("a") as file:
        file.write(line(3))
    assert numbers(files.take(reader)) == [3] and files.take(reader) == []
    log.rename(tmp_path / "old.jsonl")
    log.write_text(line(4))
    (tmp_path / "other.jsonl.tmp").rename(tmp_path / "other.jsonl")
    assert sorted(numbers(files.take(reader))) == [4, 8]
    assert files.num_broken == files.num_skipped_bytes == 0


def test_half_a_line_is_waited_for(tmp_path: Path, reader: RolloutReader) -> None:
    files, whole = RolloutFiles(tmp_path), line(7)
    log = tmp_path / "a.jsonl"
    log.write_text(line(6) + whole[:20])
    assert numbers(files.take(reader)) == [6]
    with log.open("a") as file:
        file.write(whole[20:])
    assert numbers(files.take(reader)) == [7] and files.num_broken == 0


def test_file_that_is_written_anew_is_read_anew(tmp_path: Path, reader: RolloutReader) -> None:
    """verl's dump of a step after a run went on from an older checkpoint."""
    files = RolloutFiles(tmp_path)
    (tmp_path / "5.jsonl").write_text(line(1) + line(2))
    files.take(reader)
    (tmp_path / "5.jsonl").write_text(line(3))
    assert numbers(files.take(reader)) == [3]


@pytest.mark.parametrize(
    "broken",
    [
        "{",
        "[1]",
        "\udcff",
        "[" * 100_000,
        '{"prompt_ids": [1]}',
        '{"prompt_ids": [1], "response_ids": [true]}',
        '{"prompt_ids": [1], "response_ids": [100]}',
        '{"prompt_ids": [1], "response_ids": [-1]}',
        '{"prompt_ids": [1], "response_ids": "12"}',
        '{"prompt_ids": [], "response_ids": [1]}',
        '{"prompt_ids": [1], "response_ids": []}',
        '{"prompt_ids": [1, 2, 3, 4], "response_ids": [1, 2, 3, 4, 5]}',
        '{"prompt": "a", "response": 5}',
    ],
)
def test_broken_line_is_counted_and_the_others_are_read(broken: str, tmp_path: Path, reader: RolloutReader) -> None:
    """A rollout outside the vocabulary would end the learner's pass, and with it the sidecar."""
    files = RolloutFiles(tmp_path)
    content = f"{line(1)}{broken}\n\n{line(2)}"
    (tmp_path / "a.jsonl").write_bytes(content.encode(errors="surrogateescape"))
    assert numbers(files.take(reader)) == [1, 2]
    assert files.num_broken == 1 and "a.jsonl" in files.problem


def test_text_becomes_tokens_as_the_engine_had_them(tmp_path: Path) -> None:
    """Special tokens belong before a prompt, not between prompt and response; a template has written its own."""
    rows = [
        {"prompt": "ab", "response": "cd"},
        {"input": "ab", "output": "cd", "score": 1.0},
        {"prompt": [{"role": "user", "content": "ab"}], "response": "cd"},
    ]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "".join(f"{json.dumps(row)}\n" for row in rows))
    files = RolloutFiles(tmp_path)
    found = ["".join(map(chr, sample.token_ids)) for sample in files.take(texts())]
    assert found == ["^abcd", "^abcd", "^<user>ab<assistant>cd"]
    (tmp_path / "b.jsonl").write_text(json.dumps({"prompt": "ab", "response": "c\u20ac"}) + "\n")
    assert files.take(texts()) == [] and files.num_broken == 1, "a tokenizer that is not the policy's"


def test_of_too_much_the_newest_is_read(tmp_path: Path, reader: RolloutReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sidecar that starts beside a host of weeks must not read them all into memory."""
    size = len(line(10))
    monkeypatch.setattr(rollout_files, "_LOOK_BYTES", 3 * size + size // 2)
    for number, first in enumerate((10, 20), start=1):
        file = tmp_path / f"{number}.jsonl"
        file.write_text(line(first) + line(first + 1))
        os.utime(file, (number, number))
    files = RolloutFiles(tmp_path)
    assert numbers(files.take(reader)) == [11, 20, 21]
    assert files.num_skipped_bytes == size and files.num_broken == 0
    assert files.take(reader) == []
