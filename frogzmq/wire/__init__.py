"""Bytes on the wire and back: what is said (``messages``), how it is framed, and how large it may be.

``limits``     one table of every bound on what another process may send
``messages``   what peers say to each other, as models; the protocol's version
``frames``     peer <-> peer: ZeroMQ frames <-> messages and chunks
``ranks``      rank <-> peer: datagrams of the machine-local socket <-> named tuples and models
``rank_binary``, ``rank_json``  the two sorts of datagrams, re-exported by ``ranks``

Pure functions: nothing here has a socket, a clock or a thread. Whatever bytes come in, the decoders
return a valid value or raise ``WireError``; they look at sizes before they parse, and no number that a
remote sent sizes an allocation. ``WIRE.md`` is generated from this package by ``tools/wiredoc.py``.
"""
