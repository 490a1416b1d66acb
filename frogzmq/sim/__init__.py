"""The production core under a virtual clock: many peers, links with delay, rate, loss and partitions."""
