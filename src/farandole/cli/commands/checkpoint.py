"""``farandole checkpoint``: what is in a directory of checkpoints, whether it is whole, and in other formats."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ...core.vocabulary.errors import ConfigError
from ...core.vocabulary.text import write_notice
from ...core.vocabulary.units import format_bytes, parse_bytes, read_option
from ..main import Parser, parser

_EXAMPLES = """\
  farandole checkpoint list runs/checkpoints
  farandole checkpoint verify runs/checkpoints --step 1000
  farandole checkpoint export runs/checkpoints weights              # for transformers and timm
  farandole checkpoint convert runs/checkpoints last.pt --to torch  # or --to dcp
  farandole checkpoint convert last.pt runs/checkpoints --from torch     # its weights, for fd.load
  farandole checkpoint convert weights runs/checkpoints --from safetensors # or --from dcp
  farandole checkpoint prune runs/checkpoints --keep 3 --keep-every 1000 --dry-run

DIR is the directory that was given to fd.save or fd.Checkpointer. verify ends with exit code 1 if
a checkpoint is damaged. docs/reference/checkpoints.md has the format.
"""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of this command."""
    made = parser("checkpoint", "List, verify, export, convert or prune checkpoints.", _EXAMPLES)
    actions = made.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)

    def add(name: str, text: str, directory: str = "directory of checkpoints") -> argparse.ArgumentParser:
        own = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False)
        metavar = "SOURCE" if name == "convert" else "DIR"
        own.add_argument("directory", metavar=metavar, type=Path, help=directory)
        own.add_argument("--json", action="store_true", help="print the result as JSON")
        return own

    add("list", "show the checkpoints: step, size, ranks, time, and what is unfinished or damaged")
    verify = add("verify", "compare every byte with what was written")
    verify.add_argument("--step", type=_step, metavar="N", help="this checkpoint (default: all)")
    export = add("export", "write the weights as safetensors with the model's own names")
    export.add_argument(
        "output", metavar="OUT", type=Path, help="directory, or a file that ends with .safetensors"
    )
    export.add_argument("--step", type=_step, metavar="N", help="which checkpoint (default: the last)")
    export.add_argument("--module", metavar="NAME", default="model", help="which module (default: model)")
    export.add_argument(
        "--max-shard-size", metavar="SIZE", default="5GB", help="most bytes of tensors in a file (default: 5GB)"
    )
    convert = add(
        "convert", "write a checkpoint in a format of torch, or make one of weights in another format",
        "directory of checkpoints; with --from, what to read",
    )  # fmt: skip
    convert.add_argument(
        "output",
        metavar="OUT",
        type=Path,
        help="what to write; with --from, directory of checkpoints",
    )
    way = convert.add_mutually_exclusive_group(required=True)
    way.add_argument(
        "--to", choices=("torch", "dcp"), metavar="FORMAT",
        help="torch: a file for torch.load; dcp: a directory for torch.distributed.checkpoint.load",
    )  # fmt: skip
    way.add_argument(
        "--from", dest="from_", choices=("torch", "dcp", "safetensors"), metavar="FORMAT",
        help="torch: a file of torch.save; dcp: a directory of torch.distributed.checkpoint; safetensors: a "
        "file, an index or a directory. The checkpoint has the weights, for fd.load of the model alone",
    )  # fmt: skip
    convert.add_argument(
        "--module",
        metavar="NAME",
        help="with --from: the entry with the model's state_dict (default: found)",
    )
    convert.add_argument(
        "--step", type=_step, metavar="N",
        help="which checkpoint (default: the last); with --from, its number (default: as in the source, or 0)",
    )  # fmt: skip
    prune = add("prune", "remove all checkpoints but the last few, and what unfinished saves left")
    prune.add_argument("--keep", type=_count, required=True, metavar="N", help="how many of the last to keep")
    prune.add_argument("--keep-every", type=_count, metavar="M", help="keep those of steps that M divides, too")
    prune.add_argument("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command; return the exit code."""
    options = make_parser().parse_args(arguments)
    action = {"list": _list, "verify": _verify, "export": _export, "convert": _convert, "prune": _prune}
    return action[options.action](options)


def _list(options: argparse.Namespace) -> int:
    from ...checkpoint.listing import list_checkpoints, to_text

    entries = list_checkpoints(options.directory)
    print(json.dumps([each.to_mapping() for each in entries]) if options.json else to_text(entries))
    return 0


def _verify(options: argparse.Namespace) -> int:
    from ...checkpoint.listing import COMPLETE, DAMAGED, list_checkpoints, to_text

    entries = list_checkpoints(options.directory, verify=True, only=options.step)
    damaged = [each for each in entries if each.state == DAMAGED]
    good = [each.step for each in entries if each.state == COMPLETE]
    if options.json:
        print(
            json.dumps(
                {"checkpoints": [each.to_mapping() for each in entries], "last_good": max(good, default=None)}
            )
        )
    else:
        print(to_text(entries))
        print(
            f"{len(good)} whole, {len(damaged)} damaged"
            + (f"; the last whole one is step {good[-1]}" if good else "")
        )
    return 1 if damaged or not good else 0


def _export(options: argparse.Namespace) -> int:
    from ...checkpoint.export import export_weights
    from ...checkpoint.listing import choose_step

    most = read_option("--max-shard-size", options.max_shard_size, parse_bytes)
    if most < 1:
        raise ConfigError(f"--max-shard-size {options.max_shard_size!r}: expected a size such as 5GB")
    step = choose_step(options.directory, options.step)
    done = export_weights(options.directory, step, options.output, module=options.module, most_file_bytes=most)
    for name in done.left_out:
        write_notice(f"{name} is no tensor, and is not exported")
    if options.json:
        files = [str(path) for path in done.files]
        print(json.dumps({"step": step, "files": files, "tensors": done.names, "bytes": done.nbytes}))
    else:
        print("\n".join(str(path) for path in done.files))
        print(f"step {step}: {done.names} tensors, {format_bytes(done.nbytes)}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from ...checkpoint.listing import choose_step
    from ...train.checkpoint.formats import convert_checkpoint

    if options.from_ is not None:
        return _make(options)
    if options.module is not None:
        raise ConfigError(f"--module {options.module}: it is for --from; --to writes all modules")
    step = choose_step(options.directory, options.step)
    convert_checkpoint(options.directory, step, options.output, to=options.to)
    if options.json:
        print(json.dumps({"step": step, "format": options.to, "output": str(options.output)}))
    else:
        print(f"{options.output}: step {step} for {'torch.load' if options.to == 'torch' else 'dcp.load'}")
    return 0


def _make(options: argparse.Namespace) -> int:
    from ...train.checkpoint.formats import make_checkpoint

    done = make_checkpoint(
        options.directory, options.output, from_=options.from_, module=options.module, step=options.step
    )
    if done.left_out:
        write_notice(f"left out, as only weights are converted: {', '.join(done.left_out)}")
    if done.is_unwrapped:
        write_notice('"module.", which DistributedDataParallel puts before each name, was removed')
    if options.json:
        figures = {"step": done.step, "entries": done.names, "bytes": done.nbytes, "left_out": list(done.left_out)}
        print(json.dumps({"format": options.from_, "directory": str(options.output), **figures}))
    else:
        size = format_bytes(done.nbytes)
        print(f"{options.output}: step {done.step} with {done.names} entries of a state_dict, {size}")
    return 0


def _prune(options: argparse.Namespace) -> int:
    from ...checkpoint.listing import prune_checkpoints

    done = prune_checkpoints(
        options.directory, keep=options.keep, keep_every=options.keep_every, dry_run=options.dry_run
    )
    if options.json:
        print(json.dumps(asdict(done)))
    else:
        verb = "would be removed" if options.dry_run else "removed"
        for name, steps in (("checkpoints", done.removed), ("unfinished", done.unfinished), ("kept", done.kept)):
            what = {"checkpoints": verb, "unfinished": f"unfinished, {verb}", "kept": "kept"}[name]
            print(f"{what}: {', '.join(f'step {step}' for step in steps) or 'none'}")
        for name, files in done.stays.items():
            print(f"{name} stays: Farandole did not make {', '.join(files)}")
    return 0


def _step(text: str) -> int:
    return _whole(text, 0)


def _count(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of at least {least}")
    return int(text)
