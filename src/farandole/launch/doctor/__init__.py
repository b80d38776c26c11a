"""``farandole doctor``: problems of hosts and links, and the commands that fix them.

::

    examine.py   asks every host, links them in pairs
    probe.py     answers on each host, without torch       this_host.py, link_probe.py
    facts.py     what was found, read with suspicion; memory, cores and GPUs of this host
    checks.py    facts -> findings, pure functions
    page.py      the findings as text

A host is reached by a command whose stdin and stdout carry frames: a child here, one inside the namespaces of an
emulated host, or ssh.
"""
