"""The gRPC door: jserve.v1.Inference, health and reflection."""
