"""The option of every command that emulates hosts."""

from __future__ import annotations

import argparse


def add_congestion_control(parser: argparse.ArgumentParser) -> None:
    """Add ``--congestion-control``."""
    parser.add_argument(
        "--congestion-control", metavar="NAME",
        help="TCP congestion control of emulated hosts, e.g. bbr (default: cubic, if allowed)",
    )  # fmt: skip
