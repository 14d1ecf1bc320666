"""MODEL -> its files on this machine -> a Checkpoint: parameters to be read onto a mesh or written in another format.

``open.open_checkpoint`` is the way in. Rooms: ``sources`` (where files come from), ``gguf``, ``hf`` and ``orbax`` (what
they are stored as), ``arrays`` (parameters still to be read), ``own`` (modules of the user's own), ``inspection``.
"""
