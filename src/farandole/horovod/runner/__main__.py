"""``python -m farandole.horovod.runner``: horovodrun's command line, with its output, on farandole's launcher."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    command = [sys.executable, "-m", "farandole", "run", "--as-horovod", "--output-prefix", "horovod"]
    os.execv(sys.executable, [*command, *sys.argv[1:]])
