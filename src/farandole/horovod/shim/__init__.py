"""A folder for PYTHONPATH, not a package to import: see `farandole.horovod.as_horovod`."""
