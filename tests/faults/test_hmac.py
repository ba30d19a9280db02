"""The host engine's HMAC-SHA-256 is Python's, for keys and data of every length about a block's."""

from __future__ import annotations

import hmac
import random

from tests.faults.host_parts import call_part


def test_lengths_around_a_block():
    draw = random.Random(3)
    pairs = [(draw.randbytes(draw.choice([1, 63, 64, 65, 200])), draw.randbytes(n)) for n in [*range(54, 130), 1000]]
    pairs.append((b"", b""))
    found = call_part("hmac", [(key.hex(), data.hex()) for key, data in pairs])
    assert found == [hmac.new(key, data, "sha256").hexdigest() for key, data in pairs]


def test_a_key_of_the_secret():
    found = call_part("key", [(b"secret".hex(), b"label".hex())])
    assert found == [hmac.new(b"secret", b"label", "sha256").hexdigest()]
