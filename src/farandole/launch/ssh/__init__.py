"""Ranks on other hosts, over the system's ssh: one connection a host, and everything through its pipe.

::

    launcher                                   host
    job.py  host_link.py --- ssh --- sshd --- agent.py --- ranks
            frames.py        (pipe)           frames.py

An elastic job has `elastic_fleet`, with an `elastic_host` for each host, instead of `job`, and
`elastic_agent` in that of `agent`.

No port is listened on for control, nothing is installed to run as a service, and what is secret travels
through the pipe alone.
"""
