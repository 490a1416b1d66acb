"""``frogzmq bench``: frogzmq and another backend, alternating in one run on this machine.

``main`` is the command, ``spec`` what it asks for, ``collect`` runs one layout, ``launch`` starts its ranks
(and those of ``make demo``), ``worker`` is one rank, ``probes`` reads what the kernel says, ``peers`` asks
peers, ``measure`` turns samples into figures, ``micro`` times hashing and folding alone, ``report`` draws.
Only ``worker`` imports torch.
"""
