"""The proof that updates are equivalent: replay of recordings, certificates of conversions, bounds, verdicts.

In goes a recording of an original (its states and gradients, update by update) and what shall go on from it: our step
in some framework, or an optimizer class with a converted checkpoint. Out comes, for every element of every update,
how far it is from the original, relative to a bound derived from the arithmetic (docs/bounds.md). Or in go a checkpoint
and what it became. Out comes a certificate: digests and the map of all tensors (identity), the rules' differences, both
sides stepped on the same gradients (side_by_side, probes), and which faults put into this state would show (controls).
"""
