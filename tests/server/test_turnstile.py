"""How many requests begin in one turn of the event loop."""

import asyncio
import itertools

from jaxinfer.server.turnstile import Turnstile


async def test_few_begin_in_a_turn_and_in_order():
    turnstile = Turnstile(at_once=3)
    begun = []

    async def begin(number):
        await turnstile.enter()
        begun.append(number)

    tasks = [asyncio.create_task(begin(number)) for number in range(20)]
    counts = [0]
    while len(begun) < 20:
        await asyncio.sleep(0)
        counts.append(len(begun))
    assert begun == list(range(20))
    assert max(later - now for now, later in itertools.pairwise(counts)) == 3
    assert len(counts) < 12
    await asyncio.gather(*tasks)


async def test_who_leaves_takes_nobodys_turn():
    turnstile = Turnstile(at_once=1)
    tasks = [asyncio.create_task(turnstile.enter()) for _ in range(6)]
    await asyncio.sleep(0)
    for task in tasks[1:5]:
        task.cancel()
    async with asyncio.timeout(5):
        await tasks[5]
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [isinstance(end, asyncio.CancelledError) for end in ends] == [False, *[True] * 4, False]
    async with asyncio.timeout(5):
        await turnstile.enter()
        await turnstile.enter()
