"""A worker of an elastic job: its control connection, and the change of generations.

`fd.init` uses it when the job is elastic; a training loop needs no more than to call `fd.shutdown` and
`fd.init` again after a failure. The launcher's side is in ``launch/elastic``.
"""
