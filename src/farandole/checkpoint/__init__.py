"""Checkpoints on disk: their format, their verification, and the process that writes them. No torch.

::

    DIR/
        .lock                                         who writes here
        step-00000100/
            rank-00000-of-00002.<nonce>.safetensors   what rank 0 wrote
            rank-00001-of-00002.<nonce>.safetensors
            manifest.json                             renamed into place last

A directory without ``manifest.json`` is no checkpoint. See docs/reference/checkpoints.md for the format.
"""
