"""``farandole bench suite``: all benchmarks, one page."""
