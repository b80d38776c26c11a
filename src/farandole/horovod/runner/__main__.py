"""``python -m farandole.horovod.runner``: horovodrun's command line, with its output, on farandole's launcher."""

from __future__ import annotations

from .launch import run_commandline

if __name__ == "__main__":
    run_commandline()
