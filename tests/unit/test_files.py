"""Files are whole or absent, damage is found and named, and the lock holds between processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import files
from paceline.cli import main
from paceline.files import (
    SEAL,
    ChecksumError,
    OwnedDirectory,
    atomic_directory,
    atomic_file,
    copy_verified,
    lock,
    private_directory,
    read_jsonl,
    remove_partials,
    seal,
    sha256_of,
    verify_checksums,
    verify_seal,
    write_checksums,
)
from paceline.types import PacelineError


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_gets_its_name_when_it_is_whole(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    with atomic_file(file, durable=durable) as partial:
        partial.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


def test_a_crash_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(file) as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("durable", [False, True])
def test_a_directory_gets_its_name_when_it_is_whole(tmp_path: Path, durable: bool) -> None:
    out = tmp_path / "runs" / "policy"
    with atomic_directory(out, durable=durable) as partial:
        (partial / "weights").write_text("w")
        assert not out.exists()
    assert (out / "weights").read_text() == "w"
    assert list(out.parent.iterdir()) == [out]


def test_a_crash_in_the_block_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="disk"), atomic_directory(tmp_path / "policy") as partial:
        (partial / "weights").write_text("half")
        raise RuntimeError("disk")
    assert list(tmp_path.iterdir()) == []


def test_a_finished_directory_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with pytest.raises(ValueError, match="exists"), atomic_directory(tmp_path / "policy"):
        pytest.fail("entered")


def test_what_killed_writers_left_is_removed_by_name(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from paceline.files import *\n"
        "with atomic_file(Path(sys.argv[1]) / 'a') as file, atomic_directory(Path(sys.argv[1]) / 'b') as directory:\n"
        "    file.write_text('half'); (directory / 'c').write_text('half'); os._exit(9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False).returncode == 9
    assert len(list(tmp_path.iterdir())) == 2
    remove_partials(tmp_path, "a")
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".b.")
    remove_partials(tmp_path)
    assert not list(tmp_path.iterdir())


def test_private_files_are_for_their_owner_only(tmp_path: Path) -> None:
    directory = private_directory(tmp_path / "run" / "documents")
    with atomic_file(directory / "rollouts", private=True) as partial:
        assert mode(partial) == 0o600
        partial.write_text("secret")
    assert (mode(directory), mode(directory / "rollouts")) == (0o700, 0o600)


def test_a_directory_of_another_user_or_behind_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made /dev/shm/paceline-1000 first could read all rollouts of user 1000."""
    (tmp_path / "mine").mkdir(mode=0o755)
    assert mode(private_directory(tmp_path / "mine")) == 0o700, "made by another umask"
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(PacelineError, match="link"):
        private_directory(tmp_path / "link")
    uid = os.getuid()
    monkeypatch.setattr("os.getuid", lambda: uid + 1)
    with pytest.raises(PacelineError, match="another user"):
        private_directory(tmp_path / "mine")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    with atomic_directory(tmp_path / "policy") as partial:
        (partial / "shards").mkdir()
        (partial / "config.json").write_text("{}")
        (partial / "shards" / "1.safetensors").write_bytes(bytes(range(256)))
        write_checksums(partial)
    return tmp_path / "policy"


def test_checksums_are_those_of_sha256sum(weights: Path) -> None:
    assert verify_checksums(weights) is True
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=weights, check=True, capture_output=True)


def test_a_flipped_byte_is_named(weights: Path) -> None:
    file = weights / "shards" / "1.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ChecksumError, match=r"1\.safetensors differs from its checksum"):
        verify_checksums(weights)


def test_a_run_refuses_a_policy_with_a_flipped_byte_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "policy"
    with atomic_directory(policy) as partial:
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            (partial / name).write_text(name)
        write_checksums(partial)
    (policy / "model.safetensors").write_text("nodel.safetensors")
    config = Path(__file__).parents[2] / "configs" / "arena.toml"
    assert main(["train", str(config), f"policy.model={policy}", f"run.directory={tmp_path / 'runs'}"]) == 2
    assert "model.safetensors differs from its checksum" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("damage", [b"", b"\x0b", b"\n0  config.json\n"])
def test_a_list_of_checksums_that_is_damaged_itself_is_refused(weights: Path, damage: bytes) -> None:
    """An empty list would call everything whole."""
    recorded = weights / "SHA256SUMS"
    recorded.write_bytes(recorded.read_bytes()[:-1] + damage if damage else b"")
    with pytest.raises(ChecksumError, match="SHA256SUMS is damaged"):
        verify_checksums(weights)


def test_a_sealed_file_tells_any_change_and_one_without_a_seal(tmp_path: Path) -> None:
    file = tmp_path / "sealed"
    file.write_bytes(b"head " + SEAL.encode() + bytes(100_000))
    seal(file)
    verify_seal(file)
    content = file.read_bytes()
    for damaged in (content[:-1], content + b"\0", content[:-1] + b"\1", content.replace(b"xxh3", b"xxh2"), b""):
        file.write_bytes(damaged)
        with pytest.raises(ChecksumError, match="sealed differs from the checksum in it"):
            verify_seal(file)


def test_a_missing_file_is_named(weights: Path) -> None:
    (weights / "config.json").unlink()
    with pytest.raises(ChecksumError, match=r"config\.json is missing"):
        verify_checksums(weights)


def test_a_directory_without_checksums_is_somebody_elses(weights: Path) -> None:
    (weights / "SHA256SUMS").unlink()
    assert verify_checksums(weights) is False


def test_a_copy_that_went_wrong_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"whole")
    copy_verified(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"whole"
    monkeypatch.setattr("shutil.copyfile", lambda source, target: target.write_bytes(b"whoIe"))
    with pytest.raises(ChecksumError, match="differs"):
        copy_verified(tmp_path / "a", tmp_path / "c")


def test_a_checksum_of_parts_is_that_of_the_whole() -> None:
    assert sha256_of([b"ab", memoryview(b"c")]) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_lock_holds_between_processes_and_ends_with_its_holder(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "a.lock"
    program = (
        "import sys; from pathlib import Path; from paceline.files import lock\n"
        "with lock(Path(sys.argv[1]), on_wait=lambda: None): print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(file)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
    waited = []

    def end_holder() -> None:
        waited.append(True)
        holder.kill()
        holder.communicate()

    with lock(file, on_wait=end_holder):
        assert waited
    with lock(file, on_wait=pytest.fail):
        pass


def test_json_lines_are_read_with_their_numbers(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"a": 1}\n\n[2]')  # a person left out the newline
    assert list(read_jsonl(file)) == [(1, {"a": 1}), (3, [2])]


def test_a_cut_end_is_left_out_of_what_a_program_writes_and_refused_in_what_a_person_wrote(tmp_path: Path) -> None:
    """A data file that was copied in part would otherwise train on fewer rows without a word."""
    file = tmp_path / "lines.jsonl"
    file.write_text('{"a": 1}\n{"b": ')
    assert list(read_jsonl(file, strict=True)) == [(1, {"a": 1})]
    with pytest.raises(ValueError, match=r"lines\.jsonl, line 2"):
        list(read_jsonl(file))


def test_a_line_inside_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"a": 1}) + "\nnonsense\n{}\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: got 'nonsense"):
        list(read_jsonl(file))


def test_json_lines_end_at_a_newline_only(tmp_path: Path) -> None:
    """Legal text of a row may hold what `splitlines` and universal newlines take for the end of a line."""
    text = "a\u2028b\u2029c\u0085d"
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(f'{json.dumps({"a": text}, ensure_ascii=False)}\r\n{{"a":\r1}}\n'.encode())
    assert list(read_jsonl(file)) == [(1, {"a": text}), (2, {"a": 1})]


def test_byte_order_mark_at_the_start_is_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n{"a": 2}\n')
    assert list(read_jsonl(file)) == [(1, {"a": 1}), (2, {"a": 2})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b'{"a": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested"),
        (b"9" * 5_000, "digits"),
    ],
)
def test_line_that_no_reader_could_take_is_named(tmp_path: Path, line: bytes, says: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'{"a": 1}\n' + line + b"\n")
    with pytest.raises(ValueError, match=rf"^.*prompts\.jsonl, line 2: .*{says}") as raised:
        list(read_jsonl(file))
    assert type(raised.value) is ValueError


def test_directory_of_a_killed_process_goes_when_the_next_is_made(tmp_path: Path) -> None:
    """Rollouts with hidden states would fill shared memory for ever. One whose owner lives is left alone."""
    text = "import os, sys; from pathlib import Path; from paceline.files import OwnedDirectory as O; "
    text += "own = O(Path(sys.argv[1])); (own.path / 'rollout').write_text('x'); os._exit(1)"  # nothing more runs
    subprocess.run([sys.executable, "-c", text, str(tmp_path)], check=False)
    (left,) = tmp_path.glob("*/rollout")
    first, second = OwnedDirectory(tmp_path), OwnedDirectory(tmp_path)
    assert not left.parent.exists() and first.path.is_dir()
    for directory in (first, second):
        directory.close()
    assert list(tmp_path.iterdir()) == []


def test_token_is_one_for_all_processes_and_for_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever can read it can push weights into a server."""
    monkeypatch.setattr(files, "SHARED_MEMORY", tmp_path)
    token = files.shared_token()
    assert len(token) >= 32 and files.shared_token() == token
    (file,) = tmp_path.glob("paceline-*/token")
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    file.unlink()
    assert files.shared_token() != token
