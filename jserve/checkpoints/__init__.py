"""Where weights come from, and how they are read: ``jserve.checkpoints.open.open_checkpoint`` is the door.

uri          the text of a MODEL -> where its files are
fetch        package index, Hub, local disk -> one local file or folder
gguf/        what a GGUF file holds, as arrays and settings of a family
convert      a source -> an Orbax checkpoint with its manifest beside the arrays
checkpoint   the opened checkpoint: tokenizer, template, restore onto a mesh
"""
