"""Goal: who only reads does not notice that the daemon is replaced: no error, and no miss of a block that
stayed. Method: a loop of gets and look-ups with the default on_error, the bytes compared, while the daemon is
killed and stopped in turn and started again each time; sometimes before the reader's session was resumed.
"""

import threading

import numpy as np

from kvclient.testing.conformance.case import SMALL, fill, new_keys, pattern, wait_until

RESTARTS, OF_A_SAMPLE = 50, 16  # with --whole, and else


def reading(client, keys, over, seen):
    """Counts gets, misses and errors until `over`."""
    while not over.is_set():
        try:
            assert client.lookup(keys).resident == len(keys)
            with client.get(keys) as blocks:
                seen["misses"] += len(keys) - blocks.hits
                key = keys[seen["gets"] % len(keys)]
                block = blocks[seen["gets"] % len(keys)]
                if block is not None:
                    layer = seen["gets"] % SMALL.num_layers
                    found = block.layer(layer)
                    assert np.array_equal(found, pattern(key, layer, found.shape))
                    del found
                del block
            seen["gets"] += 1
        except Exception as error:
            seen["errors"].append(error)


def test_reading_goes_on_over_restarts(daemon, layouts, request):
    restarts = RESTARTS if request.config.getoption("--whole") else OF_A_SAMPLE
    started = daemon(memory="16MiB")
    client = started.connect()
    small, _ = layouts(client)
    keys = new_keys(40)
    with client.create(keys, small) as writer:
        for index in writer.granted:
            fill(writer[index])
    over, seen = threading.Event(), {"gets": 0, "misses": 0, "errors": []}
    reader = threading.Thread(target=reading, args=(client, keys, over, seen))
    reader.start()
    try:
        for number in range(restarts):
            before = seen["gets"]
            hurried = number % 7 == 3  # the daemon goes again at once: the reader has no session with it
            if not hurried:
                wait_until(lambda: seen["gets"] > before + 1, f"the reader goes on: {seen}")  # noqa: B023
            before = seen["gets"]
            started.restart(kill=number % 2 == 0)
            assert hurried or seen["gets"] > before, f"nothing was read while no daemon ran: {seen}"
    finally:
        over.set()
        reader.join(30)
    assert (seen["misses"], seen["errors"]) == (0, [])
