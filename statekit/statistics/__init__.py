"""Statistics: the figures that plots need, each with the formula that makes it.

Histograms, tiles and bars are streamed block by block, whatever the size of a tensor. Figures of the update follow the
variant's own rule, for parameters that fit the budget. All of them are plain records that JSON can hold.
"""
