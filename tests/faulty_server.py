"""A server around a tiny engine that dies or hangs in its tenth step: `faulty_server.py FAULT`."""

import sys
import time

import jax
from tiny_engine import build

from jaxinfer import async_engine, cli


def load_engine(config):
    loaded = build()
    runner = loaded.engine.runner
    dispatch, steps = runner.dispatch, iter(range(10_000))

    def faulty(*step):
        if next(steps) == 9:
            if "hang" in sys.argv:
                time.sleep(3600)
            for leaf in jax.tree.leaves(runner._state):
                leaf.delete()
            raise ArithmeticError("injected")
        return dispatch(*step)

    def no_room():
        raise MemoryError("no room for the pool")

    runner.dispatch, runner.reset_device = faulty, no_room
    return loaded


if __name__ == "__main__":
    async_engine.load_engine = load_engine
    sys.exit(cli.main(["serve", *(word for word in sys.argv[1:] if word not in ("hang", "die"))]))
