"""The proof that updates are equivalent: replay of recordings, bounds, verdicts.

In goes a recording of an original (its states and gradients, update by update) and what shall go on from it: our step
in some framework, or an optimizer class with a converted checkpoint. Out comes, for every element of every update,
how far it is from the original, relative to a bound derived from the arithmetic (docs/bounds.md).
"""
