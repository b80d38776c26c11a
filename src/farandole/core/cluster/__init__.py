"""A cluster as figures: what its devices, links, codecs and disks give, and where each figure comes from."""
