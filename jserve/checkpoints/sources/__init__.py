"""Where checkpoints come from: the text of a MODEL, and its files brought onto this machine."""
