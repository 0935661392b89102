"""MXNet's optimizers: LANS, LAMB and Adam."""
