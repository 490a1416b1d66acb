"""The sans-IO machines: peers, groups, ops, transfer. Events in, effects out; no clock, no sockets."""
