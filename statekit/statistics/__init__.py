"""Statistics: what plots need of a checkpoint's values, each figure with the formula that makes it.

In goes a train state whose tensors are read when asked for. Out come plain records that JSON can hold: histograms,
tiles and bars that are streamed block by block, whatever the size; and figures of the update, as the variant's own
rule has it, of parameters that fit the budget.
"""
