"""Generated from proto/jserve/v1; made anew by scripts/generate."""
