"""Training data of the command line: tokens from files, cut into sequences, in an order that a seed decides."""
