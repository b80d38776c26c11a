"""The format of checkpoints: what is written is read again, and what has changed is noticed."""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from farandole.checkpoint.directory import (
    DirectoryLock,
    commit_manifest,
    make_step_directory,
    read_manifest,
    remove_checkpoint,
    remove_leftovers,
    saved_steps,
    shard_name,
    step_directory,
    steps_to_prune,
)
from farandole.checkpoint.listing import last_good_step, prune_checkpoints, verify_checkpoint
from farandole.checkpoint.manifest import (
    NAME,
    FileEntry,
    Manifest,
    PieceEntry,
    TensorEntry,
    decode,
    encode,
    parse_manifest,
)
from farandole.checkpoint.shard_file import digest, lay_out
from farandole.checkpoint.writer_client import Writer, write_file
from farandole.core.vocabulary.errors import CheckpointError

NONCE = "0123456789abcdef"


def write(directory: Path, step: int, nonce: str = NONCE) -> Manifest:
    """Write a small checkpoint of two tensors, one of them in two pieces."""
    boxes = [
        ("model/w", "float32", (0, 0), (2, 3)),
        ("model/w", "float32", (2, 0), (1, 3)),
        ("b", "int8", (0,), (5,)),
    ]
    head, pieces, nbytes = lay_out(boxes)
    content = head + bytes(range(nbytes - len(head)))
    folder = make_step_directory(directory, step)
    name = shard_name(0, 1, nonce)
    ranges = [(piece.begin, piece.begin + piece.nbytes) for piece in pieces]
    hashes = write_file(folder / name, memoryview(content), ranges)
    entries = [
        PieceEntry(name, piece.begin, piece.offsets, piece.shape, sha256)
        for piece, sha256 in zip(pieces, hashes, strict=True)
    ]
    tensors = {
        "model/w": TensorEntry("float32", (3, 3), tuple(entries[:2])),
        "b": TensorEntry("int8", (5,), (entries[2],)),
    }
    files = {name: FileEntry(nbytes, len(head), digest(head))}
    manifest = Manifest(step, 1, "2026-11-22T00:00:00", {"torch": "2"}, None, files, tensors, {"a": 1}, ({},))
    commit_manifest(directory, manifest, nonce)
    return manifest


def the_file(directory: Path, step: int) -> Path:
    return next(step_directory(directory, step).glob("*.safetensors"))


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    manifest = write(tmp_path, 7)
    assert read_manifest(tmp_path, 7) == manifest
    assert verify_checkpoint(tmp_path, 7) == manifest
    assert saved_steps(tmp_path) == [7]
    with safe_open(the_file(tmp_path, 7), "pt") as file:
        assert sorted(file.keys()) == ["b", "model/w", "model/w@2,0"]
        assert file.get_tensor("b").tolist() == [36, 37, 38, 39, 40]
    modes = {oct(path.stat().st_mode & 0o777) for path in step_directory(tmp_path, 7).iterdir()}
    assert modes == {"0o600"}


def test_every_flipped_bit_of_a_manifest_is_found(tmp_path: Path) -> None:
    data = bytearray(write(tmp_path, 1).to_bytes())
    for position in range(len(data)):
        for bit in range(8):
            data[position] ^= 1 << bit
            with pytest.raises(CheckpointError):
                parse_manifest(bytes(data), "it", 1)
            data[position] ^= 1 << bit
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(data[:length]), "it", 1)
    parse_manifest(bytes(data), "it", 1)


def test_every_changed_byte_of_a_file_is_found_and_the_last_good_one_is_known(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = the_file(tmp_path, 2)
    data = bytearray(path.read_bytes())
    positions = [*range(0, 400, 7), *range(400, len(data), 97), *range(len(data) - 45, len(data))]
    for position in positions:
        data[position] ^= 16
        path.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"damaged|safetensors header"):
            verify_checkpoint(tmp_path, 2)
        data[position] ^= 16
    assert last_good_step(tmp_path, 2) == 1
    for length in (0, 3, 8, 4096, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            verify_checkpoint(tmp_path, 2)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot read"):
        verify_checkpoint(tmp_path, 2)


def test_a_newer_version_and_paths_are_refused(tmp_path: Path) -> None:
    text = write(tmp_path, 1).to_bytes()

    def changed(**values: Any) -> bytes:
        body = json.loads(text)
        del body["sha256"]
        rest = json.dumps({**body, **values})[1:].encode()
        return b'{"sha256": "' + digest(rest).encode() + b'",\n' + rest

    parse_manifest(changed(), "it", 1)
    with pytest.raises(CheckpointError, match="format version 2, and this farandole knows up to 1") as caught:
        parse_manifest(changed(version=2), "it", 1)
    assert caught.value.exit_code == 2
    file = {"bytes": 1, "header_bytes": 1, "header_sha256": "0" * 64}
    cases: tuple[dict[str, Any], ...] = (
        {"files": {"../x": file}}, {"step": -1}, {"step": True}, {"ranks": []}, {"tensors": {"t": {}}},
        {"tensors": {"t": {"dtype": "float32", "shape": [3], "pieces": []}}}, {"world_size": "1"}, {"format": "x"},
        {"tensors": {"t": {"dtype": "load", "shape": [0], "pieces": []}}}, {"shared": []}, {"ranks": [3]},
        {"shared": {"modules": {"model": 3}}}, {"shared": {"modules": {"model": {"w": {"$tensor": "nope"}}}}},
        {"shared": {"optimizers": {"optimizer": {"state": {}, "groups": [{}]}}}}, {"ranks": [{"random": 1}]},
        {"files": {shard_name(0, 1, NONCE): {**file, "header_bytes": 2**40}}},
    )  # fmt: skip
    for values in cases:
        with pytest.raises(CheckpointError, match="it is damaged"):
            parse_manifest(changed(**values), "it", 1)


@pytest.mark.parametrize(
    ("boxes", "problem"),
    [
        ([((0, 0), (2, 3)), ((2, 0), (2, 3))], ""),
        ([((0, 0), (4, 1)), ((0, 1), (4, 2))], ""),
        ([((0, 0), (0, 3)), ((0, 0), (4, 3)), ((4, 0), (0, 3))], ""),
        ([((0, 0), (2, 3)), ((1, 0), (2, 3))], "overlap"),
        ([((0, 0), (4, 2)), ((0, 1), (4, 1))], "overlap"),
        ([((0, 0), (2, 3)), ((2, 0), (1, 3))], "do not cover it"),
    ],
)
def test_pieces_cover_their_tensor_once(boxes: list[Any], problem: str) -> None:
    name = shard_name(0, 1, NONCE)
    pieces = tuple(PieceEntry(name, 0, offsets, shape, "0" * 64) for offsets, shape in boxes)
    manifest = Manifest(
        1,
        1,
        "",
        {},
        None,
        {name: FileEntry(99, 1, "0" * 64)},
        {"t": TensorEntry("uint8", (4, 3), pieces)},
        {},
        ({},),
    )
    if problem:
        with pytest.raises(CheckpointError, match=problem):
            parse_manifest(manifest.to_bytes(), "it", 1)
    else:
        parse_manifest(manifest.to_bytes(), "it", 1)


def test_what_no_manifest_names_is_removed_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 1, nonce="f" * 16)
    stale = step_directory(tmp_path, 1) / f".manifest.json.{NONCE}"
    stale.write_text("half")
    half = make_step_directory(tmp_path, 2)
    (half / shard_name(0, 2, NONCE)).write_bytes(b"half")
    assert saved_steps(tmp_path) == [1]
    remove_leftovers(tmp_path, 1)
    remove_leftovers(tmp_path, 2)
    assert sorted(path.name for path in step_directory(tmp_path, 1).iterdir()) == [
        NAME,
        shard_name(0, 1, "f" * 16),
    ]
    assert not half.exists()
    verify_checkpoint(tmp_path, 1)
    remove_checkpoint(tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_files_that_no_save_made_stay_and_no_link_is_followed(tmp_path: Path) -> None:
    """Other frameworks name their directories alike, and users put notes beside a checkpoint."""
    home = tmp_path / "home"
    home.mkdir()
    others = [
        home / "thesis.tex",
        tmp_path / "step-00001000/pytorch_model.bin",
        tmp_path / "step-00000001/eval.json",
    ]
    write(tmp_path, 1)
    write(tmp_path, 2)
    (tmp_path / "step-00001000").mkdir()
    (tmp_path / "step-00000007").symlink_to(home)
    (home / shard_name(0, 1, NONCE)).write_text("of another run")
    for path in others:
        path.write_text("mine")
    remove_leftovers(tmp_path, 1)
    remove_leftovers(tmp_path, 1000)
    with pytest.raises(OSError, match="step-00000007"):
        remove_leftovers(tmp_path, 7)
    with pytest.raises(OSError, match="step-00000007"):
        remove_checkpoint(tmp_path, 7)
    with pytest.raises(CheckpointError, match="step-00000007 is a symbolic link to "):
        make_step_directory(tmp_path, 7)
    verify_checkpoint(tmp_path, 1)
    done = prune_checkpoints(tmp_path, keep=1)
    assert (done.removed, done.unfinished, done.kept) == ([1], [], [2])
    assert done.stays == {"step-00000001": ["eval.json"], "step-00001000": ["pytorch_model.bin"]}
    assert remove_checkpoint(tmp_path, 2) == []
    assert all(path.read_text() == "mine" for path in others)
    assert sorted(path.name for path in home.iterdir()) == [shard_name(0, 1, NONCE), "thesis.tex"]
    assert sorted(path.name for path in (tmp_path / "step-00000001").iterdir()) == ["eval.json"]
    assert not (tmp_path / "step-00000002").exists()


@pytest.mark.parametrize(
    ("keep", "keep_every", "removed"),
    [(None, None, []), (2, None, [1, 2, 3]), (9, None, []), (1, 2, [1, 3]), (1, 4, [1, 2, 3])],
)
def test_which_checkpoints_are_pruned(keep: int | None, keep_every: int | None, removed: list[int]) -> None:
    assert steps_to_prune([1, 2, 3, 4, 5], keep, keep_every) == removed


def test_two_jobs_do_not_write_to_one_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("farandole.checkpoint.directory._WAIT_SECONDS", 0.1)
    lock = DirectoryLock(tmp_path / "runs", "here", NONCE)
    with pytest.raises(CheckpointError, match=rf"written by another job: process {os.getpid()} on here") as caught:
        DirectoryLock(tmp_path / "runs", "there", NONCE)
    assert caught.value.exit_code == 2
    lock.release()
    DirectoryLock(tmp_path / "runs", "there", NONCE).release()
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*file"):
        DirectoryLock(tmp_path / "file", "here", NONCE)


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda each: st.lists(each) | st.dictionaries(st.text() | st.integers(), each) | st.tuples(each, each),
    max_leaves=8,
)  # fmt: skip


@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    text = json.dumps(encode(value, "state", lambda path, other: None), allow_nan=False)
    back = decode(json.loads(text), lambda key, body: None)
    assert back == value
    assert type(back) is type(value)


def test_values_of_the_standard_library_come_back() -> None:
    state = {
        "milestones": Counter({3: 1, 5: 2}), "order": OrderedDict([("b", 1), ("a", 2)]), "losses": deque([1.5], 4),
        "names": {"x", "y"}, "$odd": float("-inf"), 3: bytearray(b"ab"),
    }  # fmt: skip
    back = decode(json.loads(json.dumps(encode(state, "s", lambda path, other: None))), lambda key, body: None)
    assert back == state
    assert {key: type(value) for key, value in back.items()} == {key: type(value) for key, value in state.items()}
    assert back["losses"].maxlen == 4


def test_a_value_without_a_form_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"state at scheduler/lambdas/0 is a builtins.function") as caught:
        encode({"lambdas": [lambda: 1]}, "scheduler", lambda path, other: None)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, (8 << 20) + 5])
def test_a_written_file_has_its_bytes_and_hashes(tmp_path: Path, nbytes: int) -> None:
    content = os.urandom(nbytes)
    ranges = [(0, nbytes // 3), (nbytes // 3, nbytes)]
    writer = Writer()
    try:
        writer.memory(max(nbytes, 1))[:nbytes] = content
        writer.start()
        for name in ("a", "b"):
            hashes = writer.write(tmp_path / name, nbytes, ranges)
            assert hashes == [digest(content[begin:end]) for begin, end in ranges]
            assert (tmp_path / name).read_bytes() == content
        with pytest.raises(CheckpointError, match="File exists"):
            writer.write(tmp_path / "a", nbytes, ranges)
        assert writer.write(tmp_path / "c", nbytes, ranges)
    finally:
        writer.close()


def test_a_full_disk_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.write, []

    def full(descriptor: int, content: Any) -> int:
        calls.append(len(content))
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(tmp_path / "file", memoryview(bytes(20 << 20)), [])
    assert len(calls) == 2
    assert list(tmp_path.iterdir()) == []


def test_file_systems_that_sync_no_directory_and_parents_that_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_sync, plain_open = os.fsync, os.open

    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        plain_sync(descriptor)

    def open_it(path: Any, *arguments: Any, **named: Any) -> int:
        if Path(path) == tmp_path:
            raise PermissionError(errno.EACCES, "Permission denied")
        return plain_open(path, *arguments, **named)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "open", open_it)
    lock = DirectoryLock(tmp_path / "saved", "a", "b")
    write(tmp_path / "saved", 7)
    verify_checkpoint(tmp_path / "saved", 7)
    lock.release()
    monkeypatch.setattr(os, "fsync", lambda descriptor: _raise(errno.EIO))
    with pytest.raises(CheckpointError):
        DirectoryLock(tmp_path / "other", "a", "b")


def _raise(number: int) -> None:
    raise OSError(number, os.strerror(number))


def test_a_huge_header_is_no_allocation(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = the_file(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 1 << 60) + data[8:])
    with pytest.raises(CheckpointError, match="header"):
        verify_checkpoint(tmp_path, 1)
