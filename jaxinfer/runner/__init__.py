"""The device side: buckets, step inputs, KV cache, sampling, programs compiled ahead of time."""
