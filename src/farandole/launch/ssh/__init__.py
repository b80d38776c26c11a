"""Ranks on other hosts, over the system's ssh: one connection a host, and everything through its pipe.

::

    launcher                                   host
    host.py  host_link.py --- ssh --- sshd --- agent.py --- ranks, or workers of an elastic job
             frames.py        (pipe)           frames.py

No port is listened on for control, nothing is installed to run as a service, and what is secret travels
through the pipe alone.
"""
