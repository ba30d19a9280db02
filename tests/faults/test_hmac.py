"""The host engine's HMAC-SHA-256: the standard's test vectors, and Python's for random bytes of every length."""

from __future__ import annotations

import hmac
import random

from tests.faults.host_parts import call_part

# RFC 4231, test cases 1 to 4, 6 and 7: key, data, HMAC-SHA-256.
VECTORS = [
    (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
    (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
    (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
    (bytes(range(1, 26)), b"\xcd" * 50, "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"),
    (
        b"\xaa" * 131,
        b"Test Using Larger Than Block-Size Key - Hash Key First",
        "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
    ),
    (
        b"\xaa" * 131,
        b"This is a test using a larger than block-size key and a larger than block-size data. The key needs to be "
        b"hashed before being used by the HMAC algorithm.",
        "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2",
    ),
]


def test_the_standards_vectors():
    found = call_part("hmac", [(key.hex(), data.hex()) for key, data, _ in VECTORS])
    assert found == [expected for _, _, expected in VECTORS]


def test_lengths_around_a_block():
    draw = random.Random(3)
    pairs = [(draw.randbytes(draw.choice([1, 63, 64, 65, 200])), draw.randbytes(n)) for n in [*range(54, 130), 1000]]
    pairs.append((b"", b""))
    found = call_part("hmac", [(key.hex(), data.hex()) for key, data in pairs])
    assert found == [hmac.new(key, data, "sha256").hexdigest() for key, data in pairs]


def test_a_key_of_the_secret():
    found = call_part("key", [(b"secret".hex(), b"label".hex())])
    assert found == [hmac.new(b"secret", b"label", "sha256").hexdigest()]
