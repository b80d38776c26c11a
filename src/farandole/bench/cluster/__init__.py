"""``farandole measure``: what devices, links, codecs and disks give, measured into `cluster.toml`."""
