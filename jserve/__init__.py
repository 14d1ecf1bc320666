"""jserve: serve JAX models over gRPC and Arrow Flight."""

__version__ = "0.1.0"
