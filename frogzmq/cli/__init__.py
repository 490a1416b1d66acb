"""The ``frogzmq`` command. Commands load what they need when they run, so that each starts fast."""
