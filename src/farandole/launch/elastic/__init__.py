"""Jobs whose number of ranks changes while they run: the launcher's side.

`ElasticJob` (driver.py) starts workers on the hosts that are there, notices who dies, comes or must go,
and forms one generation of ranks after the other. How a host is reached it does not know: `worker_host` says
what a host is to it, `this_machine` is one, and `launch.ssh` has another. What the workers
do is in ``train/elastic``.
"""
