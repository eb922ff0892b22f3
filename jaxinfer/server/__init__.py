"""OpenAI's HTTP API on aiohttp. Knows requests and replies; all generating is the engine's."""
