"""Helpers of Horovod's launcher that programs import: `threads`. The launcher itself is farandole's."""
