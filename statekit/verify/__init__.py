"""The proof that updates are equivalent: replay of recordings, certificates of conversions, bounds, verdicts.

`replay` takes a recording of an original (states and gradients, update by update) and the implementation that shall
continue it: our step in some framework, or an optimizer class with a converted checkpoint. It returns, for every
element of every update, the distance from the original relative to a bound that is derived from the arithmetic
(docs/bounds.md). `verify` takes a checkpoint and its conversion and returns a certificate: digests and the map of all
tensors (identity), the rules' differences, both sides stepped on the same gradients (side_by_side, probes), and the
faults that would show if they were put into this state (controls).
"""
