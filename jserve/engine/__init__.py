"""Token ids in, token ids out: the scheduler, the KV pages, the compiled step and the loop that drives them."""
