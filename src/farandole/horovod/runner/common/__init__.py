"""Parts of Horovod's launcher that programs import: `util.env`."""
