"""The engine of encoders: whole texts in, one vector a text out, batched as they come."""
