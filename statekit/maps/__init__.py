"""Maps: from the parameters of one codebase's model to another's, with all that an optimizer keeps of them.

In goes a state, and a map: a model map, which is data (`converters/models/`), or a renaming. Out comes a state under
the other names, in which every slot has followed its parameter, and an account of what became of what; or an error that
lists every name of either side that the map doesn't cover. No value is read.
"""
