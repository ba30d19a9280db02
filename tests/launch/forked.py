"""Fork workers from one process that has imported all they need: ``python forked.py '[[arguments, variables], ...]'``.

For ranks by hand, whose launcher would be a shell. The exit code is the highest of theirs.
"""

import json
import os
import sys

import worker


def main():
    children = []
    for arguments, variables in json.loads(sys.argv[1]):
        child = os.fork()
        if child == 0:
            os.environ.clear()
            os.environ.update(variables)
            sys.argv[1:] = arguments
            return worker.main()
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256 for child in children)


if __name__ == "__main__":
    sys.exit(main())
