"""A worker of an elastic job: its line to the launcher, and how it goes from one generation to the next.

`fd.init` uses it when the job is elastic; a training loop needs no more than to call `fd.shutdown` and
`fd.init` again after a failure. The launcher's side is in ``launch/elastic``.
"""
