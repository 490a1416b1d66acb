"""The peer process: sockets, threads and files around the sans-IO core.

``main``      command line, lock, logging, signals
``build``     puts a peer together from its configuration
``loop``      the poll loop
``driver``    carries the core's effects out
``fabric``    ZeroMQ sockets towards other peers (``link``: one dialled connection, ``auth``: who gets in)
``ranks``     the machine-local socket (``rankconn``: one connection)
``absent``    members of forming groups that will never join
``workers``   threads for hashing and folding
``peek``      what a peer says about itself
"""
