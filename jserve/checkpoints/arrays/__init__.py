"""Parameters that are still to be read: named, renamed by maps that are data, and put onto a mesh."""
