"""A name that sglang-jax's tests import and do not use."""

TEST_RERANK_QUERY_DOCS: list[object] = []
