"""Saves one checkpoint after the other until it is killed: files by the writer, then the manifest. No torch."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from farandole.checkpoint.directory import (
    commit_manifest,
    make_step_directory,
    remove_checkpoint,
    remove_leftovers,
    saved_steps,
    shard_name,
)
from farandole.checkpoint.manifest import FileEntry, Manifest, PieceEntry, TensorEntry
from farandole.checkpoint.shard_file import digest, lay_out
from farandole.checkpoint.writer_client import Writer

ROWS = 400


def main() -> None:
    """Save steps 1, 2, 3 ... to the directory of the first argument, two of each number, and keep the last two."""
    directory, writer = Path(sys.argv[1]), Writer()
    writer.start()
    first = max(saved_steps(directory), default=0)
    for count in range(2 * first, 1_000_000):
        step, nonce = count // 2 + 1, secrets.token_hex(8)
        head, pieces, nbytes = lay_out([("w", "uint8", (0, 0), (ROWS, 4096))])
        memory = writer.memory(nbytes)
        memory[: len(head)] = head
        memory[len(head) : nbytes] = os.urandom(nbytes - len(head))
        name = shard_name(0, 1, nonce)
        path = make_step_directory(directory, step) / name
        (piece,) = pieces
        (sha256,) = writer.write(path, nbytes, [(piece.begin, nbytes)])
        entry = TensorEntry("uint8", (ROWS, 4096), (PieceEntry(name, piece.begin, (0, 0), (ROWS, 4096), sha256),))
        files = {name: FileEntry(nbytes, len(head), digest(head))}
        commit_manifest(directory, Manifest(step, 1, "", {}, None, files, {"w": entry}, {}, ({},)), nonce)
        remove_leftovers(directory, step)
        for old in saved_steps(directory)[:-2]:
            remove_checkpoint(directory, old)


main()
