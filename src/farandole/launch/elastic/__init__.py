"""Jobs whose number of ranks changes while they run: the launcher's side.

`run_elastic` (driver.py) starts workers on the hosts that are there, notices who dies, comes or must go,
and forms one generation of ranks after the other. What the workers do is in ``train/elastic``.
"""
