"""compute-sanitizer over one call of each kernel, where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

from .program import ROOT, Program

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The kernels' names, so that torch's own aren't instrumented.
FILTER = ("--kernel-regex", "kns=coll_")
# What libraries ask the driver for and it doesn't have (cuGetProcAddress) is no error of a kernel,
# and would count.
KERNELS_ALONE = ("--report-api-errors", "no")


def main() -> int:
    program = Program(__doc__, "sanitizer")
    program.parser.add_argument("--tool", choices=TOOLS, default="memcheck")
    arguments = program.parse()
    inner = [sys.executable, "-m", "benchmarks.gpu.every_kernel", "--device", arguments.device]
    if arguments.dry:
        done = subprocess.run([*inner, "--dry"], cwd=ROOT, capture_output=True, text=True)
        print(done.stdout[-4000:], done.stderr[-4000:])
        program.row(case=arguments.tool, result="dry", status=done.returncode)
        return done.returncode
    found = shutil.which("compute-sanitizer")
    if found is None:
        program.row(case=arguments.tool, result="not installed")
        return 0
    command = [found, "--tool", arguments.tool, *FILTER, *KERNELS_ALONE, "--error-exitcode", "99"]
    command += [*inner, "--unchecked"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout[-100_000:])
    summary = [line.lstrip("= ") for line in done.stdout.splitlines() if re.search(r"SUMMARY|Device not supp", line)]
    clean = done.returncode == 0 and bool(summary)
    program.row(case=arguments.tool, result="clean" if clean else "not clean", status=done.returncode, summary=summary)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
