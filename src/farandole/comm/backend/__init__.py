"""A process group of `torch.distributed` on this package's own exchanges: ``init_process_group("farandole")``."""
