"""Who folds which bytes and who sends what to whom: pure functions."""
