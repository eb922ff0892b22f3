"""Load on a server that speaks OpenAI's protocol: requests, arrivals, a client, what came of it."""
