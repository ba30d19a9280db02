"""Call every kernel once on small arrays, and check its result; compute-sanitizer runs this. A kernel
of `abi` that no case launches is a failure.
"""

from __future__ import annotations

import sys

from .program import Program, open_device, synchronize

NBYTES = 40_000  # more than one tile, and a last one that isn't full


def main() -> int:
    program = Program(__doc__, "every_kernel")
    program.parser.add_argument("--unchecked", action="store_true", help="launch, and check nothing")
    arguments = program.parse()
    device = open_device(arguments.device)
    from collectives.kernels import abi

    from .kernel_cases import CASES
    from .launched import record_launches

    def run(name):
        case = CASES[name](NBYTES, device)
        case.call()
        synchronize(device)
        if not arguments.unchecked:
            case.check()

    with record_launches() as names:
        for name in CASES:
            program.attempt(name, run, name)
    missing = {each.name for each in vars(abi).values() if isinstance(each, abi.Kernel)} - names
    program.failures += bool(missing)
    program.row(case="launched", kernels=sorted(names), not_launched=sorted(missing), cases=len(CASES))
    return program.status()


if __name__ == "__main__":
    sys.exit(main())
