"""What several tests of load tests are about: some records, and a file of requests."""

import json

from jaxinfer.load_test.record import RequestRecord

RECORDS = [
    RequestRecord(0.0, 0.0, 1.0, [0.25, 0.5, 1.0], 10, 4, 4),
    RequestRecord(0.5, 0.75, 1.25, [1.25], 20, 0, 1),
    RequestRecord(1.0, 1.0, 4.0, [1.5, 4.0], 30, 0, 2),
    RequestRecord(1.0, 1.0, 1.5, error="429", message="the queue is full"),
    RequestRecord(1.5, 1.5, 2.0, [1.75], 5, 0, 1, "429", "another"),
]


def write_replay(path, *lines):
    """A file for --replay; returns its path."""
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path
