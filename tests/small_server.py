"""`jaxinfer serve` around a tiny engine, with what the flags say of its queue."""

import sys

from tiny_engine import build

from jaxinfer import async_engine, cli


def load_engine(config):
    return build(max_queued_requests=config.max_queued_requests + config.max_num_seqs)


if __name__ == "__main__":
    async_engine.load_engine = load_engine
    sys.exit(cli.main(["serve", *sys.argv[1:]]))
