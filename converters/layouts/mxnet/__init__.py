"""The layouts of MXNet's LANS, LAMB and Adam, as a Trainer and an Updater save them.

Input: the parameters, the states by index, and the pickled optimizer as an inert record. Output: the canonical state
with counts and multipliers by parameter; or the two parts again, indices for names and one optimizer for all groups.
Each optimizer's module holds what is its own.
"""
