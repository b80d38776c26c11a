"""Jobs whose number of ranks changes while they run: the launcher's side.

`ElasticJob` (driver.py) starts workers on the hosts that are there, notices who dies, comes or must go,
and forms one generation of ranks after the other. How a host is reached it does not know: `workers` says
what a host is to it, and has this machine; `launch.ssh` has another. What the workers do is in ``train/elastic``.
"""
